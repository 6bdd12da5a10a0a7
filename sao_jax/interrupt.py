"""Signals ask the process to stop at the next place where it may; a second Ctrl-C stops at once.

Ctrl-C, SIGTERM (a scheduler), SIGHUP (a lost terminal) and SIGUSR1 (Slurm's warning) mean the same. One that the
process was started to ignore, as `nohup` has it for SIGHUP, stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Protocol, runtime_checkable

from absl import logging

POLL = 0.5  # seconds between two looks at a requested interruption during a long wait
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1

ENDS_PROCESS = "ends_process"  # attribute of a handler that may be called in any thread, since it does not return

_END = 0  # no signal has this number


@runtime_checkable
class StopSignal(Protocol):
  """A signal that long work looks at now and then, to stop once `requested` is True."""

  @property
  def requested(self) -> bool: ...


class Interrupted(Exception):
  """The process was asked to stop: there is no result."""


class Interrupt:
  """Context manager; `requested` becomes True once the process was asked to stop.

  A thread watches for the signals, since Python's own handlers wait for the main thread, which may compile for minutes.
  Outside the main thread (a notebook's worker, a test) nothing is installed and `requested` stays False. Copies of the
  process (os.fork) have the handlers from before.

  Attributes:
    requested: True once the process was asked to stop.
    saves: False as long as there is nothing to lose: a signal then ends the process, as it would have done before.
  """

  def __init__(self, *, saves: bool = True) -> None:
    self.requested, self.saves = False, saves
    self._previous: dict[int, object] = {}
    self._handled = self._watched = False
    self._installed = False

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is not threading.main_thread():
      return self
    self._installed = True
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    self._previous_write = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    for number in SIGNALS:
      if signal.getsignal(number) not in (signal.SIG_IGN, None):
        self._previous[number] = signal.signal(number, self._handle)
    os.register_at_fork(after_in_child=self._restore)

    self._thread = threading.Thread(target=self._watch, name="interrupt", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    if not self._installed:
      return
    self._restore()
    os.write(self._write, bytes([_END]))
    self._thread.join()
    os.close(self._read)
    os.close(self._write)

  def _restore(self) -> None:
    """Puts everything back as it was; a second time nothing is left to do."""
    if not self._installed:
      return
    self._installed = False
    with contextlib.suppress(ValueError):  # a copy made by another thread than the main one
      signal.set_wakeup_fd(self._previous_write)
      while self._previous:
        signal.signal(*self._previous.popitem())

  def _handle(self, number: int, frame: FrameType | None) -> None:
    """Python's handler, in the main thread, as soon as it is between two instructions."""
    if not self.saves or (self._handled and number == signal.SIGINT):
      previous = self._previous[number]
      if callable(previous):  # Python's own raises KeyboardInterrupt
        previous(number, frame)
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      end(number)
    self.requested = self._handled = True

  def _watch(self) -> None:
    """The thread: sees every signal at once, whatever the main thread is doing."""
    while True:
      for number in os.read(self._read, 64):
        if number == _END:
          return
        if number in self._previous:
          self._notice(number)

  def _notice(self, number: int) -> None:
    """Ends the process if that is due, or says what happens; other handlers are left to the main thread."""
    if not self.saves or (self._watched and number == signal.SIGINT):
      previous = self._previous.get(number)
      if getattr(previous, ENDS_PROCESS, False):
        previous(number, None)
      elif not callable(previous):
        end(number)
      return
    name, again = signal.Signals(number).name, self._watched
    self.requested = self._watched = True
    if not again:
      logging.info("%s: stopping as soon as nothing is lost. A second Ctrl-C ends the program at once.", name)


def end(number: int, frame: FrameType | None = None) -> None:
  """Ends the process like a signal that nothing handles, with a line."""
  os.write(2, f"{signal.Signals(number).name}: nothing was begun that could be saved; ending.\n".encode())
  os._exit(128 + number)
