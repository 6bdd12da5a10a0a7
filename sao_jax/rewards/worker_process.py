"""A child process that calls one function again and again; killed with all that it started, it never outlives us.

It starts from a fresh interpreter (never a fork of this process, which has threads). Its output is discarded, and it
does not see the terminal's Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from sao_jax.rewards import grader_worker

START_TIMEOUT = 120.0  # seconds for a worker to import the modules that its function needs


class WorkerLost(Exception):
  """The worker is of no use any more, for the reason in the message."""


class WorkerProcess:
  """One worker, to be used by one thread at a time; `kill` may be called from any."""

  def __init__(self, max_answer: int):
    """Starts the interpreter; an answer of more than `max_answer` bytes is a fault."""
    self._max_answer = max_answer
    self._process = subprocess.Popen(
      [sys.executable, "-P", grader_worker.__file__],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,  # out of reach of the terminal's Ctrl-C, and a group of its own to kill
    )

  def poll(self) -> int | None:
    """Returns the exit status; None while it runs."""
    return self._process.poll()

  def wait(self) -> int:
    """Waits for its end."""
    return self._process.wait()

  def kill(self) -> None:
    """Ends the worker and all processes that it started; from any thread."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)

  def set_up(self, setup: bytes) -> None:
    """Loads the function.

    Raises:
      WorkerLost: it cannot be loaded.
    """
    _, problem = self.exchange(setup, START_TIMEOUT)
    if problem is not None:
      raise WorkerLost(f"could not be loaded: {problem}")

  def exchange(self, request: bytes, timeout: float | None) -> tuple[Any, str | None]:
    """Sends a request and waits for its answer: (result, None) or (None, problem).

    Raises:
      WorkerLost: no answer within `timeout` seconds (None: for ever), none that can be read, or its end.
      BrokenPipeError: it had ended before, and has read nothing.
    """
    process, answer = self._process, bytearray()
    deadline = None if timeout is None else time.monotonic() + timeout
    process.stdin.write(grader_worker.LENGTH.pack(len(request)) + request)
    process.stdin.flush()

    # An answer is one line. Until it is whole, the worker may be late, be gone, or write too much.
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not answer.endswith(b"\n"):
      if not poll.poll(None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))):
        raise WorkerLost(f"took longer than {timeout:g} s and was killed")
      piece = os.read(process.stdout.fileno(), 65536)
      answer += piece
      if not piece or len(answer) > self._max_answer:
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(1.0)
        raise WorkerLost(f"died, exit status {process.returncode}")

    # The line comes from a process that runs a policy's text: it is parsed, never unpickled.
    try:
      result, problem = json.loads(answer)
    except (TypeError, ValueError) as error:
      raise WorkerLost(f"answered {bytes(answer[:80])!r}") from error
    return result, problem

  def drop(self) -> None:
    """Ends it, and gives everything back."""
    self.kill()
    self._process.wait()
    with contextlib.suppress(OSError):  # from a request that it never read
      self._process.stdin.close()
    self._process.stdout.close()
