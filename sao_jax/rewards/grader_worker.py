"""A `WorkerProcess`, as a script: reads requests, calls one function, and answers, until its parent has gone.

Requests are pickled by the parent and framed by their length. Answers are lines of JSON, which the parent never
unpickles: the code that makes them has read text of a policy.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
NICENESS = 5  # the parent's event loop and the sampler go first
GRACE = 1.0  # seconds after the time-out, when the kernel ends a worker that nobody has killed
MAX_PROBLEM = 500  # characters


def main() -> None:
  """Serves the parent, which holds the other ends of standard input and output."""
  requests, replies = _private_streams()
  os.nice(NICENESS)
  waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
  threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()

  # The first request is the set-up; all others are arguments.
  sys.path[:], timeout, pickled = pickle.loads(waiting.get())
  function, problem = _attempt(pickle.loads, pickled)
  _answer(replies, None, problem)
  while function is not None:
    arguments = pickle.loads(waiting.get())
    # A function that spins without ever freeing the interpreter's lock must not outlive a killed parent.
    signal.setitimer(signal.ITIMER_REAL, 0.0 if timeout is None else timeout + GRACE)
    text, problem = _attempt(_call, function, arguments)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    _answer(replies, text, problem)


def grade(grader: Callable[..., Any], environment: str, *arguments: Any) -> float:
  """Calls a grader; its reward is checked here, where it was made."""
  from sao_jax.rewards.scalar import check_reward  # the path to it comes from the parent

  return check_reward(grader(*arguments), environment)


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
  """Moves the parent's pipes away from standard input and output, where graders that read or print find nothing."""
  streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  nothing = os.open(os.devnull, os.O_RDWR)
  os.dup2(nothing, 0)
  os.dup2(nothing, 1)
  return streams


def _read(requests: BinaryIO, waiting: queue.SimpleQueue[bytes]) -> None:
  while len(header := requests.read(LENGTH.size)) == LENGTH.size:
    waiting.put(requests.read(*LENGTH.unpack(header)))
  os._exit(0)  # the parent has gone, whatever the grader is doing


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
  return json.dumps(function(*arguments))


def _attempt(call: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
  """Calls a function; returns (result, None) or (None, problem)."""
  try:
    return call(*arguments), None
  except BaseException as error:  # the function may do anything, even try to leave the interpreter
    known = getattr(error, "problem", None)  # of a GraderFailure
    problem = known if isinstance(known, str) else "".join(traceback.format_exception_only(error)).strip()
    return None, problem[:MAX_PROBLEM]


def _answer(replies: BinaryIO, text: str | None, problem: str | None) -> None:
  replies.write(f"[{text or 'null'}, {json.dumps(problem)}]\n".encode("ascii"))
  replies.flush()


if __name__ == "__main__":
  main()
