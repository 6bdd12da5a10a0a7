"""Ctrl-C and SIGTERM ask the process to stop at the next place where it may; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Protocol

from absl import logging

POLL = 0.5  # seconds between two looks at a requested interruption during a long wait


class StopSignal(Protocol):
  """A signal that long work looks at now and then, to stop once `requested` is True."""

  @property
  def requested(self) -> bool: ...


class Interrupted(Exception):
  """The process was asked to stop: there is no result."""


class Interrupt:
  """Context manager; `requested` becomes True once the process was asked to stop.

  Outside the main thread (a notebook's worker, a test) no handler is installed and `requested` stays False.
  """

  def __init__(self) -> None:
    self.requested = False
    self._previous: dict[int, object] = {}

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    if self.requested and number == signal.SIGINT:
      previous = self._previous[number]
      if callable(previous):  # Python's own raises KeyboardInterrupt
        previous(number, frame)
      raise KeyboardInterrupt
    self.requested = True
    logging.info("%s: stopping as soon as nothing is lost.", signal.Signals(number).name)
