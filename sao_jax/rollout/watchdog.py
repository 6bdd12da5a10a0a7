"""Notices what nobody would report: rollouts that have gone silent, a sampler that died unobserved, lost exceptions."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from sao_jax.rollout.loop_clock import call_of

log = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between looks


class Watchdog:
  """A thread that calls `look` twice a second until it is stopped; what `look` raises goes to `fail`, and ends it."""

  def __init__(self, look: Callable[[], None], fail: Callable[[BaseException], None]):
    self._look, self._fail = look, fail
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name="rollout-watchdog", daemon=True)

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def stop(self) -> None:
    """Ends the thread and waits for it, unless called from it."""
    self._stop.set()
    if self._thread.is_alive() and threading.current_thread() is not self._thread:
      self._thread.join()

  def _run(self) -> None:
    while not self._stop.wait(PERIOD):
      try:
        self._look()
      except BaseException as error:  # whatever it is, it must reach the main loop
        self._fail(error)
        return


class Activity:
  """Remembers when something last happened.

  >>> now, tokens = [0.0], [0]
  >>> activity = Activity(lambda: tokens[0], clock=lambda: now[0])
  >>> now[0] = 5.0
  >>> activity.silence
  5.0
  >>> tokens[0] = 7  # somebody is being served
  >>> activity.silence
  0.0
  """

  def __init__(self, progress: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic):
    """`progress` returns what changes while somebody works; a change counts as soon as `silence` is asked for."""
    self._progress, self._clock = progress, clock
    self._seen = progress()
    self.note()

  def note(self) -> None:
    """Notes that something happened."""
    self._last = self._clock()

  @property
  def silence(self) -> float:
    """Seconds since something last happened."""
    if (seen := self._progress()) != self._seen:
      self._seen = seen
      self.note()
    return self._clock() - self._last


def report_callbacks(event_loop: asyncio.AbstractEventLoop, fail: Callable[[BaseException], None]) -> None:
  """Lets what a callback of the loop raises reach `fail`: asyncio would write it to its log, and go on without.

  What comes from a callback or a task that an environment's call has left behind is its own affair, and only logged.
  """

  def handle(event_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error, handle = context.get("exception"), context.get("handle")
    call = call_of(handle)
    if error is not None and handle is not None and call is None:
      fail(error)
    else:
      log.warning("%s%s", context["message"], f", left behind by {call.name}" if call else "", exc_info=error)

  event_loop.set_exception_handler(handle)


def describe_tasks(tasks: Iterable[asyncio.Task], limit: int = 20) -> str:
  """Shows where tasks are suspended, one line each: its name, then its awaits from the outermost to the innermost."""
  tasks = sorted(tasks, key=lambda task: task.get_name())  # the call that a rollout waits for comes behind it
  lines = []
  for task in tasks[:limit]:
    places, awaited = [], task.get_coro()
    while awaited is not None:
      frame = getattr(awaited, "cr_frame", None)
      if frame is not None:
        places.append(f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
      awaited = getattr(awaited, "cr_await", None)
    lines.append(f"  {task.get_name()}: {' > '.join(places)}")
  if len(tasks) > limit:
    lines.append(f"  and {len(tasks) - limit} more")
  return "\n".join(lines)


def describe_thread(thread: threading.Thread) -> str:
  """Shows the stack of a thread, innermost call last: what blocks an event loop."""
  frame = sys._current_frames().get(thread.ident)
  return "".join(traceback.format_stack(frame, limit=6)) if frame is not None else "  the thread has ended\n"
