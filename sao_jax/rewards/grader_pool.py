"""Graders in worker processes that are killed when they take too long: no reward function can hold up anything else.

A thread cannot be ended from outside, and a thread that computes keeps the event loop from running. A process can be
killed, leaves the event loop alone, and dies with its parent, even when the parent itself is killed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import math
import pickle
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards import grader_worker
from sao_jax.rewards.queueing import begin_waiting
from sao_jax.rewards.scalar import check_reward
from sao_jax.rewards.worker_process import WorkerLost, WorkerProcess

MAX_ANSWER = 65536  # bytes


class GraderPool:
  """Calls one grader in several processes; from any thread and event loop.

  A worker (see `WorkerProcess`) starts when it is first needed, and again after it was killed.

  >>> from sao_jax.rewards.exact_match import integer_match
  >>> pool = GraderPool(integer_match, processes=1, timeout=10.0)
  >>> asyncio.run(pool.grade("calculator", "-81", -81))  # integer_match("-81", -81), in a worker
  1.0
  >>> pool.close()
  """

  def __init__(self, grader: Callable[..., Any], *, processes: int = 2, timeout: float = 10.0):
    """Prepares the pool; workers start with their first tasks.

    Args:
      grader: function that returns one finite number; picklable, with its code in a module. Every worker has a copy.
      processes: the largest number of workers.
      timeout: seconds for one call, after which the worker is killed.

    Raises:
      ConfigError: for a grader that cannot be sent to another process, or settings that cannot work.
    """
    if processes < 1:
      raise ConfigError("processes", f"{processes} workers grade nothing.", "Use at least 1.")
    if not 0.0 < timeout < math.inf:
      raise ConfigError("timeout", f"{timeout} s is no time-out.", "Use a finite number of seconds above 0.")
    setup = pickle_setup(functools.partial(grader_worker.grade, grader), timeout, field="grader", function=grader)
    self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
    self._threads = [_WorkerThread(self._tasks, setup, timeout) for _ in range(processes)]
    self._finalizer = weakref.finalize(self, _close, self._tasks, self._threads)

  async def grade(self, environment: str, *arguments: Any) -> float:
    """Grades the arguments (any picklable values) in a worker; returns the grader's reward.

    Until a worker takes it up, the call that asks is waiting for its turn, see `queueing`.

    Raises:
      GraderFailure: under the name `environment`, when the grader raised, returned anything but one finite number, took
        too long, or its process died. That is never a reward of 0.
    """
    task = _Task(environment, pickle_request(environment, *arguments), begin_waiting())
    if not self._finalizer.alive:
      raise GraderFailure(environment, "the graders have been closed")
    self._tasks.put(task)
    try:
      return await asyncio.wrap_future(task.future)
    finally:
      task.begins()  # if it never did: nobody waits any more

  def close(self) -> None:
    """Kills the workers; happens by itself when the pool is garbage-collected, and at the interpreter's exit."""
    self._finalizer()


def pickle_setup(called: Callable[..., Any], timeout: float | None, *, field: str, function: Any) -> bytes:
  """Makes the first request of a worker, which will call `called` for at most `timeout` seconds a time.

  Raises:
    ConfigError: naming `field`, when `function`, what the user gave, cannot be sent to another process.
  """
  remedy = "Define it at the top level of a module that can be imported, and pass data as arguments."
  module = getattr(function, "__module__", None)
  if module == "__main__":
    raise ConfigError(field, f"{function!r:.80} lives in the main program, which workers do not import.", remedy)
  try:
    return pickle.dumps((sys.path, timeout, pickle.dumps(called)))
  except Exception as error:  # what __reduce__ may raise is anything
    raise ConfigError(field, f"{function!r:.80} cannot be sent to a process: {error}", remedy) from error


def pickle_request(*arguments: Any) -> bytes:
  """Makes any other request of a worker: the arguments of a call."""
  return pickle.dumps(arguments)


def _close(tasks: queue.SimpleQueue[_Task | None], threads: list[_WorkerThread]) -> None:
  for thread in threads:
    thread.closed = True
    tasks.put(None)
    thread.kill()


@dataclasses.dataclass(frozen=True)
class _Task:
  environment: str
  request: bytes
  begins: Callable[[], None]  # says that the task has waited for its turn until now
  future: concurrent.futures.Future[float] = dataclasses.field(default_factory=concurrent.futures.Future)


class _WorkerThread:
  """A thread that hands tasks to its worker, one by one. It holds no reference to the pool, which can be collected."""

  def __init__(self, tasks: queue.SimpleQueue[_Task | None], setup: bytes, timeout: float):
    self.closed = False
    self._tasks, self._setup, self._timeout = tasks, setup, timeout
    self._process: WorkerProcess | None = None
    threading.Thread(target=self._run, name="grader", daemon=True).start()

  def kill(self) -> None:
    """Ends the worker and all processes that it started; from any thread."""
    process = self._process
    if process is not None:
      process.kill()

  def _run(self) -> None:
    while (task := self._tasks.get()) is not None:
      if not task.future.set_running_or_notify_cancel():
        continue  # nobody waits for the answer any more
      try:
        task.future.set_result(self._grade(task))
      except BaseException as error:
        task.future.set_exception(error)
    self._drop()

  def _grade(self, task: _Task) -> float:
    try:
      if self._process is None or self._process.poll() is not None:
        self._restart()
      task.begins()
      try:
        reward, problem = self._process.exchange(task.request, self._timeout)
      except BrokenPipeError:  # the worker was killed from outside while it was idle, and has read nothing
        self._restart()
        reward, problem = self._process.exchange(task.request, self._timeout)
    except (WorkerLost, OSError) as error:
      self._drop()
      raise GraderFailure(task.environment, f"the grader {error}") from None
    if problem is not None:
      raise GraderFailure(task.environment, f"the grader failed, {problem}")
    return check_reward(reward, task.environment)

  def _restart(self) -> None:
    self._drop()
    if self.closed:
      raise WorkerLost("has been closed")
    self._process = WorkerProcess(MAX_ANSWER)
    if self.closed:  # perhaps just now, when there was nothing to kill yet
      self.kill()
    self._process.set_up(self._setup)

  def _drop(self) -> None:
    if self._process is not None:
      self._process.drop()
      self._process = None
