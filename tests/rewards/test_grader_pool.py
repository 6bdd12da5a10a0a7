"""Graders in processes: one reward or a failure with its reason; killed in time, gone with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from toys import graders
from toys.paths import TESTS

from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards.grader_pool import GraderPool

PROMPTLY = 5.0  # seconds


def grade(pool: GraderPool, *arguments):
  return asyncio.run(pool.grade("env", *arguments))


def wait_until(condition, seconds: float = 20.0) -> None:
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "waited in vain"
    time.sleep(0.005)


def is_alive(pid: int) -> bool:
  """Whether the process, or a thread of it, runs; one that nobody has reaped does not."""
  try:
    dead = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return not dead or len(list(pathlib.Path(f"/proc/{pid}/task").iterdir())) > 1
  except (FileNotFoundError, ProcessLookupError):
    return False


@pytest.fixture(scope="module")
def misbehaving():
  pool = GraderPool(graders.misbehave, processes=1, timeout=1.0)
  yield pool
  pool.close()


@pytest.mark.parametrize(
  "kind, problem",
  [
    ("raise", "failed, ValueError: cannot parse"),
    ("exit", "failed, SystemExit: 0"),
    ("die", "died, exit status 0"),
    ("crash", "died, exit status -11"),
    ("hang", "took longer than 1 s and was killed"),
    ("spin", "took longer than 1 s and was killed"),
    ("ignore signals", "took longer than 1 s and was killed"),
    ("nan", "finite number, got nan"),
    ("none", "finite number, got NoneType"),
    ("text", "finite number, got str"),
    ("huge", "finite number, got inf"),
    ("list", "finite number, got list"),
    ("bool", "finite number, got bool"),
  ],
)
def test_what_a_grader_does_wrong_is_a_failure_and_never_zero(misbehaving, kind, problem):
  with pytest.raises(GraderFailure, match=f"'env'.*{problem}"):
    grade(misbehaving, kind)
  assert grade(misbehaving, "print") == 0.25  # the next one is graded, and what it printed is no answer
  assert grade(misbehaving, "read") == 0.0  # nobody's standard input


def test_rewards_come_back_exactly_whoever_asks():
  with_numpy = GraderPool(np.float32, processes=2)
  values = [0.1, -3.0, 1e-300, 1e14, 7]

  async def all_at_once():
    return await asyncio.gather(*(with_numpy.grade("env", value) for value in values * 5))

  assert asyncio.run(all_at_once()) == [float(np.float32(value)) for value in values * 5]
  results: list[float] = []
  threads = [threading.Thread(target=lambda: results.append(grade(with_numpy, 0.5))) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(20)
  assert results == [0.5] * 4
  with_numpy.close()
  with pytest.raises(GraderFailure, match="closed"):
    grade(with_numpy, 0.5)


def test_a_worker_that_is_killed_from_outside_is_replaced():
  pool = GraderPool(graders.process_id, processes=1)
  first = int(grade(pool))
  assert first != os.getpid() and int(grade(pool)) == first
  os.kill(first, signal.SIGKILL)
  wait_until(lambda: not is_alive(first))
  second = int(grade(pool))
  assert second != first
  pool.close()
  wait_until(lambda: not is_alive(second))


def test_one_that_dies_as_it_is_asked_has_read_nothing():
  """Its death need not be known yet: the pipe is broken, so another worker is asked."""
  pool = GraderPool(graders.process_id, processes=1)
  first = int(grade(pool))
  thread = pool._threads[0]
  process = thread._process
  os.kill(first, signal.SIGKILL)
  process.wait()
  process.poll = lambda: None  # as long as the kernel still takes it apart
  assert int(grade(pool)) != first
  pool.close()


def descendants(pid: int) -> list[int]:
  """All processes below one."""
  parents = {}
  for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):
      parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
  below = [pid]
  for process in below:
    below += [child for child, parent in parents.items() if parent == process]
  return below[1:]


def test_killed_while_grading_with_all_its_children():
  pool = GraderPool(graders.misbehave, processes=1, timeout=30.0)
  before = set(descendants(os.getpid()))

  async def run():
    task = asyncio.create_task(pool.grade("env", "child"))
    while len(new := [pid for pid in descendants(os.getpid()) if pid not in before]) < 2:
      await asyncio.sleep(0.01)
    worker, grandchild = new
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(GraderFailure, match="died, exit status -9"):
      await asyncio.wait_for(task, PROMPTLY)
    return grandchild

  grandchild = asyncio.run(run())
  wait_until(lambda: not is_alive(grandchild))
  pool.close()


def test_nobody_waits_for_a_task_that_was_given_up():
  pool = GraderPool(graders.burn, processes=1, timeout=1.0)

  async def run():
    assert await pool.grade("env", 0.0) == 1.0
    running = asyncio.create_task(pool.grade("env", 60.0))
    given_up = [asyncio.create_task(pool.grade("env", 60.0)) for _ in range(50)]
    await asyncio.sleep(0.1)
    for task in given_up:
      task.cancel()
    wanted = asyncio.create_task(pool.grade("env", 0.0, 0.5))
    with pytest.raises(GraderFailure):
      await running
    return await asyncio.wait_for(wanted, 20)  # 50 killed workers would take longer

  assert asyncio.run(run()) == 0.5
  pool.close()


def test_workers_import_no_jax_and_not_the_main_program():
  pool = GraderPool(graders.seen_by_a_worker, processes=1)
  names = ("toys.graders", "sao_jax", "jax", "numpy", "pytest")
  assert [grade(pool, name) for name in names] == [
    1.0,
    1.0,
    0.0,
    0.0,
    0.0,
  ]
  pool.close()


def local(value: float) -> float:
  return value


@pytest.mark.parametrize(
  "make, field",
  [
    (lambda: GraderPool(lambda: 1.0), "grader"),
    (lambda: GraderPool(threading.Lock().acquire), "grader"),
    (lambda: GraderPool(type("f", (), {"__module__": "__main__", "__call__": lambda self: 1.0})()), "grader"),
    (lambda: GraderPool(local, processes=0), "processes"),
    (lambda: GraderPool(local, timeout=0.0), "timeout"),
    (lambda: GraderPool(local, timeout=float("nan")), "timeout"),
    (lambda: GraderPool(local, timeout=float("inf")), "timeout"),
  ],
)
def test_what_cannot_work_is_refused(make, field):
  with pytest.raises(ConfigError) as caught:
    make()
  assert caught.value.field == field


def test_a_grader_that_a_worker_cannot_import_is_a_failure(monkeypatch):
  def function(value: float) -> float:
    return value

  monkeypatch.setitem(sys.modules, "only_here", sys)
  monkeypatch.setattr(sys, "function", function, raising=False)
  function.__module__, function.__qualname__ = "only_here", "function"
  pool = GraderPool(function, processes=1)
  with pytest.raises(GraderFailure, match="could not be loaded: ModuleNotFoundError.*only_here"):
    grade(pool, 1.0)
  pool.close()


PARENT = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from toys import graders
from sao_jax.rewards.grader_pool import GraderPool

pids = GraderPool(graders.process_id, processes=1)
pool = GraderPool(graders.misbehave, processes=2, timeout={timeout})

async def main():
  print(int(await pids.grade("env")), flush=True)
  hanging = [asyncio.create_task(pool.grade("env", kind)) for kind in {kinds!r}]
  await asyncio.sleep({seconds})

asyncio.run(main())
"""


def start_parent(**values) -> tuple[subprocess.Popen, int]:
  values = {"tests": str(TESTS), "timeout": 600.0, "kinds": ["hang", "hang"], "seconds": 600.0, **values}
  process = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(PARENT).format(**values)],
    cwd=TESTS.parent,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  return process, int(process.stdout.readline())


def test_a_parent_whose_graders_hang_exits_at_once():
  process, _ = start_parent(seconds=1.0)
  began = time.monotonic()
  output = process.communicate(timeout=60)
  assert process.returncode == 0 and output[1] == ""
  assert time.monotonic() - began < 30  # not the graders' 600 s


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_parent(number):
  process, idle = start_parent()
  wait_until(lambda: len(descendants(process.pid)) == 3)
  workers = descendants(process.pid)
  assert idle in workers
  process.send_signal(number)
  process.communicate(timeout=20)
  wait_until(lambda: not any(is_alive(pid) for pid in workers), PROMPTLY)


def test_a_worker_that_lets_no_thread_run_does_not_outlive_a_killed_parent_for_long():
  process, _ = start_parent(timeout=2.0, kinds=["spin"], seconds=600.0)
  wait_until(lambda: len(descendants(process.pid)) == 2)
  workers = descendants(process.pid)
  time.sleep(0.5)  # it has begun
  process.kill()
  process.communicate(timeout=20)
  wait_until(lambda: not any(is_alive(pid) for pid in workers))


def test_ctrl_c_in_a_terminal_ends_the_parent_without_a_word_from_the_workers():
  process, _ = start_parent()
  wait_until(lambda: len(descendants(process.pid)) == 3)
  workers = descendants(process.pid)
  os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole group
  _, errors = process.communicate(timeout=20)
  assert "KeyboardInterrupt" in errors and "grader_worker" not in errors and "graders.py" not in errors
  wait_until(lambda: not any(is_alive(pid) for pid in workers), PROMPTLY)
