"""Marks the time that a call waits for its turn at something shared: the call is not charged for it.

A time-out of a call is for the call's own work. While it queues for a grader or a worker process that others occupy,
whoever measures the call (a `QueueMeter` in its context) stops the clock.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator


class QueueMeter:
  """Adds up the seconds in which a call waited for its turn, anywhere; thread-safe.

  >>> now = [0.0]
  >>> meter = QueueMeter(lambda: now[0])
  >>> over = meter.begin()
  >>> now[0] = 2.0
  >>> over()
  >>> now[0] = 5.0
  >>> meter.seconds
  2.0
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock, self._lock = clock, threading.Lock()
    self._waits, self._since, self._total = 0, 0.0, 0.0

  @property
  def seconds(self) -> float:
    """Seconds until now, the present wait included."""
    with self._lock:
      return self._total + (self._clock() - self._since if self._waits else 0.0)

  def begin(self) -> Callable[[], None]:
    """Begins a wait, and returns the function that ends it; waits at the same time count once."""
    with self._lock:
      if not self._waits:
        self._since = self._clock()
      self._waits += 1
    ended = False

    def end() -> None:
      nonlocal ended
      with self._lock:
        if ended:
          return
        ended = True
        self._waits -= 1
        if not self._waits:
          self._total += self._clock() - self._since

    return end


METER: contextvars.ContextVar[QueueMeter | None] = contextvars.ContextVar("queue_meter", default=None)


def begin_waiting() -> Callable[[], None]:
  """Begins a wait of the present call, if anybody measures it; the function that this returns ends it, once."""
  meter = METER.get()
  return meter.begin() if meter is not None else lambda: None


@contextlib.contextmanager
def waiting() -> Iterator[None]:
  """Marks a block in which the present call waits for its turn."""
  end = begin_waiting()
  try:
    yield
  finally:
    end()
