"""Long work that says what it is and how long it has taken: compilations last for minutes, and nothing else moves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable, Iterator

from absl import logging

from sao_jax.background import beside

FIRST, EVERY = 1.0, 10.0  # seconds until the first line, and between those that follow


@contextlib.contextmanager
def announced(what: str, *, first: float = FIRST, every: float = EVERY) -> Iterator[None]:
  """Logs what is going on, and for how long, once it lasts; work that ends at once is not worth a line.

  A thread of its own speaks, since a compilation holds the one that waits for it.

  Args:
    what: the work, as in "compiling 12 programs of the sampler".
    first: seconds until the first line.
    every: seconds between the lines that follow.
  """
  began = time.monotonic()
  said: list[bool] = []

  def speak(ended: threading.Event) -> None:
    if ended.wait(first):
      return
    logging.info("%s ...", what)
    said.append(True)
    while not ended.wait(every):
      logging.info("%s ... (%.0f s so far)", what, time.monotonic() - began)

  with beside(speak, "announce"):
    yield
  if said:
    logging.info("%s: done after %.1f s.", what, time.monotonic() - began)


class FirstUses:
  """Announces the first use of each program, which is the one that compiles it."""

  def __init__(self) -> None:
    self._seen: set[Hashable] = set()

  def __call__(self, program: Hashable, what: str) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which to use `program`: announced as `what` the first time."""
    if program in self._seen:
      return contextlib.nullcontext()
    self._seen.add(program)
    return announced(what)
