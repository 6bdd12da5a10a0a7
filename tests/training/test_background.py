"""Work beside a block: it ends with it, and a failure is said once in a row."""

from __future__ import annotations

import threading

import pytest

from sao_jax.background import beside, now_and_then


def test_work_ends_with_the_block_however_that_ends():
  left = []

  def work(ended):
    ended.wait()
    left.append(threading.current_thread().name)

  with pytest.raises(ZeroDivisionError), beside(work, "worker"):
    raise ZeroDivisionError
  assert left == ["worker"]


def test_a_failure_is_said_once_until_it_works_again(caplog):
  done, outcomes = threading.Event(), iter([OSError("a"), OSError("b"), None, OSError("c"), KeyError("the last")])

  def work():
    outcome = next(outcomes)
    if isinstance(outcome, KeyError):
      done.set()
    if outcome is not None:
      raise outcome

  with beside(now_and_then(work, 0.001, "it failed: %r", last=(KeyError,)), "worker"):
    assert done.wait(10)
  assert [record.getMessage() for record in caplog.records] == [
    "it failed: OSError('a')",
    "it failed: OSError('c')",
    "'the last'",
  ]
