"""Long work says what it is; work that ends at once says nothing."""

from __future__ import annotations

import threading
import time

import pytest
from absl import logging

from sao_jax.announce import FirstUses, announced


class Lines(list):
  """What was logged; `wait` until there are so many lines."""

  def __init__(self):
    super().__init__()
    self.changed = threading.Condition()

  def log(self, message, *arguments):
    with self.changed:
      self.append(message % arguments)
      self.changed.notify_all()

  def wait(self, count):
    with self.changed:
      assert self.changed.wait_for(lambda: len(self) >= count, 60)


@pytest.fixture
def lines(monkeypatch):
  lines = Lines()
  monkeypatch.setattr(logging, "info", lines.log)
  return lines


def test_it_says_what_and_how_long_so_far(lines):
  with announced("Compiling it", first=0.0, every=0.01):
    lines.wait(3)  # while the work goes on
  assert lines[0] == "Compiling it ..." and lines[1].startswith("Compiling it ... (") and "so far" in lines[1]
  assert lines[-1].startswith("Compiling it: done after")


def test_short_work_says_nothing_and_an_error_comes_through(lines):
  with announced("Compiling it", first=60.0):
    pass
  with pytest.raises(KeyError), announced("Compiling it", first=60.0):
    raise KeyError
  assert not lines and not [thread for thread in threading.enumerate() if thread.name == "announce"]


def test_only_the_first_use_of_a_program_is_announced():
  first_uses, began = FirstUses(), time.monotonic()
  kinds = []
  for program in ("a", "a", "b", "a"):
    with first_uses(program, "Compiling"):
      kinds.append(any(thread.name == "announce" for thread in threading.enumerate()))
  assert kinds == [True, False, True, False] and time.monotonic() - began < 60
