"""Graders in worker processes that are killed when they take too long: no reward function can hold up anything else.

A thread cannot be ended from outside, and a thread that computes keeps the event loop from running. A process can be
killed, leaves the event loop alone, and dies with its parent, even when the parent itself is killed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards import grader_worker
from sao_jax.rewards.scalar import check_reward

START_TIMEOUT = 120.0  # seconds for a worker to import the modules that its grader needs
MAX_ANSWER = 65536  # bytes


class GraderPool:
  """Calls one grader in several processes; from any thread and event loop.

  A worker starts when it is first needed, from a fresh interpreter (never a fork of this process, which has threads),
  and again after it was killed. Its output is discarded, and it does not see the terminal's Ctrl-C.

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
    setup = pickle.dumps((sys.path, timeout, _pickled(grader)))
    self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
    self._threads = [_WorkerThread(self._tasks, setup, timeout) for _ in range(processes)]
    self._finalizer = weakref.finalize(self, _close, self._tasks, self._threads)

  async def grade(self, environment: str, *arguments: Any) -> float:
    """Grades the arguments (any picklable values) in a worker; returns the grader's reward.

    Raises:
      GraderFailure: under the name `environment`, when the grader raised, returned anything but one finite number, took
        too long, or its process died. That is never a reward of 0.
    """
    task = _Task(environment, pickle.dumps((environment, arguments)))
    if not self._finalizer.alive:
      raise GraderFailure(environment, "the graders have been closed")
    self._tasks.put(task)
    return await asyncio.wrap_future(task.future)

  def close(self) -> None:
    """Kills the workers; happens by itself when the pool is garbage-collected, and at the interpreter's exit."""
    self._finalizer()


def _pickled(grader: Callable[..., Any]) -> bytes:
  remedy = "Define it at the top level of a module that can be imported, and pass data as arguments."
  if getattr(grader, "__module__", None) == "__main__":
    raise ConfigError("grader", f"{grader!r:.80} lives in the main program, which workers do not import.", remedy)
  try:
    return pickle.dumps(grader)
  except Exception as error:  # what __reduce__ may raise is anything
    raise ConfigError("grader", f"{grader!r:.80} cannot be sent to a process: {error}", remedy) from error


def _close(tasks: queue.SimpleQueue[_Task | None], threads: list[_WorkerThread]) -> None:
  for thread in threads:
    thread.closed = True
    tasks.put(None)
    thread.kill()


@dataclasses.dataclass(frozen=True)
class _Task:
  environment: str
  request: bytes
  future: concurrent.futures.Future[float] = dataclasses.field(default_factory=concurrent.futures.Future)


class _Lost(Exception):
  """The worker is of no use any more, for the reason in the message."""


class _WorkerThread:
  """A thread that hands tasks to its worker, one by one. It holds no reference to the pool, which can be collected."""

  def __init__(self, tasks: queue.SimpleQueue[_Task | None], setup: bytes, timeout: float):
    self.closed = False
    self._tasks, self._setup, self._timeout = tasks, setup, timeout
    self._process: subprocess.Popen | None = None
    threading.Thread(target=self._run, name="grader", daemon=True).start()

  def kill(self) -> None:
    """Ends the worker and all processes that it started; from any thread."""
    process = self._process
    if process is not None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

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
      try:
        reward, problem = self._exchange(task.request, self._timeout)
      except BrokenPipeError:  # the worker was killed from outside while it was idle, and has read nothing
        self._restart()
        reward, problem = self._exchange(task.request, self._timeout)
    except (_Lost, OSError) as error:
      self._drop()
      raise GraderFailure(task.environment, f"the grader {error}") from None
    if problem is not None:
      raise GraderFailure(task.environment, f"the grader failed, {problem}")
    return check_reward(reward, task.environment)

  def _restart(self) -> None:
    self._drop()
    if self.closed:
      raise _Lost("has been closed")
    self._process = subprocess.Popen(
      [sys.executable, "-P", grader_worker.__file__],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,  # out of reach of the terminal's Ctrl-C, and a group of its own to kill
    )
    if self.closed:  # perhaps just now, when there was nothing to kill yet
      self.kill()
    _, problem = self._exchange(self._setup, START_TIMEOUT)
    if problem is not None:
      raise _Lost(f"could not be loaded: {problem}")

  def _exchange(self, request: bytes, timeout: float) -> tuple[Any, str | None]:
    """Sends a request and waits for its answer: (reward, None) or (None, problem)."""
    process, answer, deadline = self._process, b"", time.monotonic() + timeout
    process.stdin.write(grader_worker.LENGTH.pack(len(request)) + request)
    process.stdin.flush()

    # An answer is one line. Until it is whole, the worker may be late, be gone, or write too much.
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not answer.endswith(b"\n"):
      if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise _Lost(f"took longer than {timeout:g} s and was killed")
      piece = os.read(process.stdout.fileno(), MAX_ANSWER)
      answer += piece
      if not piece or len(answer) > MAX_ANSWER:
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(1.0)
        raise _Lost(f"died, exit status {process.returncode}")

    # The line comes from a process that runs a policy's text: it is parsed, never unpickled.
    try:
      reward, problem = json.loads(answer)
    except (TypeError, ValueError) as error:
      raise _Lost(f"answered {answer[:80]!r}") from error
    return reward, problem

  def _drop(self) -> None:
    if self._process is not None:
      self.kill()
      self._process.wait()
      with contextlib.suppress(OSError):  # from a request that it never read
        self._process.stdin.close()
      self._process.stdout.close()
      self._process = None
