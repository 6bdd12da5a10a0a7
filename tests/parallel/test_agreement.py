"""Decisions that all processes make together, and what a process learns of one that fails, differs or is silent."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from toys import processes
from toys.paths import REPOSITORY
from toys.shared_store import SharedStore, together

from sao_jax.errors import ConfigError
from sao_jax.parallel import agreement
from sao_jax.parallel.agreement import ALONE, Disagreement, Processes, ProcessFailed, SharedStop
from sao_jax.parallel.watch import leave_failed, watched


class Signal:
  requested = False


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  monkeypatch.setattr(agreement, "SLICE", 0.02)
  monkeypatch.setattr(agreement, "SIGN", 0.01)
  monkeypatch.setattr(agreement, "RESCUE_SECONDS", 0.2)


def test_all_processes_get_the_values_of_all_and_the_store_stays_small():
  def decide(processes):
    index = processes.index
    made = [
      processes.gather("values", {"of": index}),
      processes.any("a stop", index == 1),
      processes.max("rows", 10 - index),
      processes.equal("the step", 7),
      processes.first("versions", [index]),
    ]
    sent = processes.to_writer("numbers", index)
    for _ in range(20):
      processes.gather("again", "x")
    return made, sent

  store = SharedStore()
  results = together(store, 3, decide)
  expected = [[{"of": 0}, {"of": 1}, {"of": 2}], True, 10, 7, [0]]
  assert results == [(expected, [0, 1, 2]), (expected, None), (expected, None)]
  assert len([key for key in store.entries if "/alive/" not in key]) <= 4


def test_a_process_alone_decides_by_itself():
  value = object()  # not even JSON is needed
  assert ALONE.gather("anything", value) == [value] and ALONE.first("anything", value) is value
  assert ALONE.equal("anything", value) is value and ALONE.to_writer("anything", value) == [value]
  assert ALONE.max("rows", 3) == 3 and ALONE.any("a stop", True) and not ALONE.any("a stop", False)
  ALONE.request_stop()
  ALONE.fail(RuntimeError("it"))
  assert not ALONE.stop_requested and ALONE.agree_after_failure(1)
  signal = Signal()
  assert agreement.shared_stop(signal, ALONE) is signal and agreement.all_processes() is ALONE


def test_processes_that_decide_different_things_are_told_which():
  name = lambda processes: processes.gather("a stop" if processes.index else "the rows of a batch", 1)
  for error in together(SharedStore(), 2, name):
    assert isinstance(error, Disagreement)
    assert "decision 1" in str(error) and "process 0 on 'the rows of a batch', process 1 on 'a stop'" in str(error)
  for error in together(SharedStore(), 2, lambda processes: processes.equal("the step", processes.index)):
    assert isinstance(error, Disagreement) and "differ in the step: 0 on process 0, 1 on process 1" in str(error)


def test_the_others_learn_why_a_process_failed_and_agree_on_what_to_save():
  def fails(processes):
    processes.fail(ValueError("no prompts"))
    return processes.agree_after_failure(12)

  step = None  # at which the last one is

  def waits(processes):
    with pytest.raises(ProcessFailed, match=r"Process 1 has failed \(ValueError: no prompts\)"):
      processes.gather("the rows of a batch", 1)
    return processes.agree_after_failure(12 if processes.index < 2 else step)

  for step, saved in ((12, True), (13, False)):  # noqa: B007
    assert together(SharedStore(), 3, waits, fails, waits) == [saved] * 3
  assert together(SharedStore(), 2, waits, lambda processes: processes.fail(ValueError("no prompts")))[0] is False


def test_nobody_counts_on_a_process_that_has_given_the_rescue_up():
  store = SharedStore()
  assert not Processes(1, 2, store).agree_after_failure(12)  # alone for too long
  assert not Processes(0, 2, store).agree_after_failure(12)


def test_a_process_that_shows_no_sign_of_life_is_given_up_and_one_that_waits_is_not():
  def slow(processes):
    stop, seen = SharedStop(Signal(), processes), []
    while len(seen) < 20:  # it looks at the stop signal, as every long wait does
      seen.append(stop.requested)
      agreement.time.sleep(0.03)
    return processes.gather("the step", 1)

  assert (
    together(SharedStore(), 2, lambda processes: processes.gather("the step", 1), slow, seconds=0.3) == [[1, 1]] * 2
  )
  error, _ = together(SharedStore(), 2, lambda processes: processes.gather("the step", 1), lambda p: None, seconds=0.1)
  assert isinstance(error, ProcessFailed) and "Process 1 has shown no sign of life" in str(error)


def test_a_process_that_looks_at_nothing_gives_signs_while_it_is_busy():
  def reads(processes):
    with processes.busy():
      agreement.time.sleep(0.5)
    return processes.gather("the step", 1)

  waits = lambda processes: processes.gather("the step", 1)
  assert together(SharedStore(), 2, waits, reads, seconds=0.2) == [[1, 1]] * 2


def test_the_first_failure_is_that_of_all_with_its_status_and_stops_long_waits():
  store = SharedStore()
  first, second = (Processes(index, 2, store) for index in (0, 1))
  assert first.failure() is None and not first.stop_requested and not first.gone()
  second.fail(ValueError("no prompts"), 2)
  first.fail(RuntimeError("the other is gone"))
  for process in (first, second):
    failure = process.failure()
    assert (failure.process, failure.status) == (1, 2) and "(ValueError: no prompts)" in str(failure)
  agreement.time.sleep(0.03)
  assert first.stop_requested  # and the next decision says why
  second.go()
  assert first.gone() == {1} and not second.gone()


def test_bad_input_that_one_process_meets_late_has_its_status_for_all():
  """Whoever tells of it, as the saver does: the launcher comes behind."""
  for error, status in ((ConfigError("environment", "no prompt fits.", "Mend it."), 2), (OSError("disk full"), 1)):
    first, second = (Processes(index, 2, store) for store in [SharedStore()] for index in (0, 1))
    second.fail(error)
    assert first.failure().status == status


def watched_end(act, **options):
  """The failures with which a process is ended that sleeps, while `act` does something to the other."""
  store, ended = SharedStore(), []
  own, other = (Processes(index, 2, store) for index in (0, 1))
  times = {"every": 0.01, "grace": 0.1, "rescue": 0.1} | options
  with watched(own, ended.append, **times):
    act(own, other)
    agreement.time.sleep(0.5)
  return [str(failure) for failure in ended]


def test_a_process_that_waits_elsewhere_is_ended_once_others_have_failed():
  failed = ["Process 1 has failed (OSError: full)."]
  assert watched_end(lambda own, other: None) == []
  assert watched_end(lambda own, other: other.fail(OSError("full"))) == failed
  assert watched_end(lambda own, other: (other.fail(OSError("full")), other.go()), rescue=60.0) == failed

  # One that knows of it may be saving, as long as the others are there.
  def noticed(own, other):
    other.fail(OSError("full"))
    with pytest.raises(ProcessFailed):
      own.gather("the step", 1)

  assert watched_end(noticed) == []
  assert watched_end(lambda own, other: (noticed(own, other), other.go())) == failed


def test_the_one_that_keeps_the_store_stays_until_the_others_have_read():
  store = SharedStore()
  own, other = (Processes(index, 2, store) for index in (0, 1))
  own.fail(OSError("full"))
  timer = threading.Timer(0.2, other.go)
  timer.start()
  leave_failed(own, seconds=30.0)
  assert own.gone() == {1} and other.gone() == {0}


def test_the_stop_of_one_is_that_of_all():
  store, signal = SharedStore(), Signal()
  one, other = (SharedStop(own, Processes(i, 2, store)) for i, own in enumerate([signal, Signal()]))
  assert not one.requested and not other.requested
  signal.requested = True
  assert one.requested
  agreement.time.sleep(0.03)
  assert other.requested


def test_a_process_alone_asks_for_no_device():
  """A report that is drawn beside a run must not take its TPU."""
  code = (
    "from sao_jax.parallel.agreement import all_processes\n"
    "from launch._processes import joined\n"
    "with joined(None):\n"
    "  assert all_processes().count == 1\n"
    "from jax._src import xla_bridge\n"
    "assert not xla_bridge.backends_are_initialized()\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, env=processes.environment())
