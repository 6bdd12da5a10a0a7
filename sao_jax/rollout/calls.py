"""Calls of an environment: with a time-out that only the call itself can use up, and one type for all that goes wrong.

An environment is other people's code. Whatever it raises, an exception that is no `Exception` too, such as the panic of
a library written in Rust, is an `EnvironmentFailure` and costs one rollout. Only `KeyboardInterrupt` and `SystemExit`
keep their meaning: they end the run, as themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from sao_jax.episode import BadPrompt, EnvironmentFailure, InfrastructureFailure
from sao_jax.rollout.loop_clock import Call, LoopClock
from sao_jax.rollout.outcomes import EnvironmentTimeout, EventLoopBlocked, UnexpectedFailure

T = TypeVar("T")


@contextlib.contextmanager
def failures_of(environment: str, what: str) -> Iterator[None]:
  """Turns whatever synchronous code of an environment raises into an `EnvironmentFailure`.

  Args:
    environment: its name.
    what: the subject of the failure's sentence, as in "step raised ValueError".
  """
  try:
    yield
  except (EnvironmentFailure, BadPrompt, KeyboardInterrupt, SystemExit):
    raise
  except OSError as error:  # connections, pipes, files, processes
    raise InfrastructureFailure(environment, f"{what} raised {type(error).__name__}: {error}") from error
  except BaseException as error:
    raise UnexpectedFailure(environment, f"{what} raised {type(error).__name__}: {error}") from error


def make_environment(
  make: Callable[[], T],
  environment: str,
  seconds: float,
  clock: LoopClock,
  *,
  close: Callable[[T], object] = lambda made: None,
) -> T:
  """Makes an environment, in the event loop; raises what `call_environment` raises.

  `close` is called with one that took too long, and that nobody gets.
  """
  call = Call(f"making environment {environment!r}", clock)
  with failures_of(environment, "making it"):
    made = call.run_now(make)
  try:
    _check_time(call, environment, "making it", seconds)
  except EnvironmentFailure:
    close(made)
    raise
  return made


async def call_environment(
  function: Callable[[], Awaitable[T]],
  environment: str,
  method: str,
  seconds: float,
  clock: LoopClock,
  *,
  retryable: bool = False,
) -> T:
  """Calls a method of an environment, and gives it up after `seconds`, even if it does not obey its cancellation.

  Time in which the event loop stood still is not counted, unless it was this call that held the loop.

  Args:
    function: makes the call.
    environment: the environment's name.
    method: the method's.
    seconds: the time-out.
    clock: beats in the running event loop.
    retryable: a call that hangs is worth another try with a fresh environment.

  Raises:
    EnvironmentTimeout: the call took too long.
    EventLoopBlocked: it held the event loop itself for most of that time.
    EnvironmentFailure: it raised something.
  """
  call = Call(f"{method} of environment {environment!r}", clock)
  name = f"{asyncio.current_task().get_name()}, call"
  task = asyncio.create_task(call.run(lambda: _awaitable(function())), name=name)

  # The time left is looked at again after every wait: the loop may have stood still meanwhile.
  try:
    while not task.done() and (left := seconds - call.elapsed) > 0.0:
      await asyncio.wait({task}, timeout=left)
  finally:
    if not task.done():
      task.cancel()
      task.add_done_callback(lambda task: task.cancelled() or task.exception())  # what it raises later has no reader

  result = None
  if task.done():
    with failures_of(environment, method):
      if task.cancelled():  # by itself; raised here it would look like a cancellation of the caller
        raise RuntimeError("the call cancelled itself")
      result = task.result()
  _check_time(call, environment, method, seconds, done=task.done(), retryable=retryable)
  return result


def _awaitable(result: Awaitable[T]) -> Awaitable[T]:
  if not inspect.isawaitable(result):
    raise TypeError(
      f"it returned {type(result).__name__}, nothing to await: write `async def`, or wrap a synchronous environment "
      "in sao_jax.environments.InThreads"
    )
  return result


def _check_time(
  call: Call, environment: str, method: str, seconds: float, *, done: bool = True, retryable: bool = False
) -> None:
  """Refuses a call that is not done, or was only because everybody's clock stood still while it held the loop."""
  if done and not call.served <= seconds < call.elapsed:
    return
  if call.held > call.served:
    raise EventLoopBlocked(
      environment,
      f"{method} blocked the event loop for {call.held:.1f} s, and with it every other episode; a call may take "
      f"{seconds:g} s. Use `await`, or wrap a synchronous environment in InThreads or InProcesses of "
      "sao_jax.environments",
    )
  raise EnvironmentTimeout(environment, f"{method} took longer than {seconds:g} s", retryable=retryable)
