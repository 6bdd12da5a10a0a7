"""Runs a coroutine in an event loop in another thread, so that this one stays free to notice that it should stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sao_jax.interrupt import Interrupted, StopSignal
from sao_jax.rollout.watchdog import report_callbacks

T = TypeVar("T")

POLL = 0.2  # seconds between two looks at a requested interruption
PATIENCE = 2.0  # seconds for what is left over: environments that are being closed, calls that were given up


def run_in_background(
  coroutine: Coroutine[Any, Any, T],
  *,
  interrupt: StopSignal | None = None,
  look: Callable[[asyncio.AbstractEventLoop], None] = lambda event_loop: None,
) -> T:
  """Runs a coroutine to its end; works where this thread runs an event loop already, as in a notebook.

  What hangs in it, against its cancellation too, is left behind in a thread that holds up nobody's exit.

  Args:
    coroutine: what to run.
    interrupt: cancels it when the process is asked to stop.
    look: called with its event loop now and then; cancels it by raising.

  Raises:
    Interrupted: the process was asked to stop.
    BaseException: what the coroutine or `look` raised, as itself.
  """
  # The coroutine lives in an event loop of its own, in a thread that no exit waits for.
  event_loop = asyncio.new_event_loop()
  task, left = event_loop.create_task(coroutine), []
  thread = threading.Thread(target=_serve, args=(event_loop, task, left), name="episodes", daemon=True)
  thread.start()

  # This thread looks around until it ends, and cancels it on the way out of an exception.
  try:
    while thread.is_alive():
      thread.join(POLL)
      if not task.done():
        if interrupt is not None and interrupt.requested:
          raise Interrupted("asked to stop")
        look(event_loop)
  finally:
    if not task.done():
      event_loop.call_soon_threadsafe(task.cancel)
      thread.join(3 * PATIENCE)

  if left:
    raise left[0]
  return task.result()


def _serve(event_loop: asyncio.AbstractEventLoop, task: asyncio.Task, left: list[BaseException]) -> None:
  def fail(error: BaseException) -> None:
    left.append(error)
    task.cancel()

  # Not asyncio.run, which waits for tasks and threads that hang.
  report_callbacks(event_loop, fail)
  try:
    # SystemExit and KeyboardInterrupt of any task leave the event loop: the first one ends the coroutine, in order.
    while not task.done():
      try:
        event_loop.run_until_complete(asyncio.wait({task}))
      except BaseException as error:
        fail(error)
    for cancel in (False, True):
      rest = asyncio.all_tasks(event_loop)
      if cancel:
        for left_over in rest:
          left_over.cancel()
      if rest:
        event_loop.run_until_complete(asyncio.wait(rest, timeout=PATIENCE))
  finally:
    event_loop.close()
