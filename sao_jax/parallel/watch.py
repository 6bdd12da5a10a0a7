"""A watch over the failures of other processes, for a main thread that waits where nothing tells it of them.

Who waits for a decision learns at once that another process has failed. A barrier of a library or a collective of
devices would wait for it for minutes, or for ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import jax

from sao_jax.background import beside
from sao_jax.parallel.agreement import RESCUE_SECONDS, Processes, ProcessFailed
from sao_jax.parallel.roll_call import Lines

EVERY = 1.0  # seconds between two looks
GRACE = 5.0  # seconds to end by itself, for a process whose partners have gone


@contextlib.contextmanager
def watched(
  processes: Processes,
  end: Callable[[ProcessFailed], None],
  *,
  every: float = EVERY,
  grace: float = GRACE,
  rescue: float = RESCUE_SECONDS,
) -> Iterator[None]:
  """Calls `end` with the failure of another process which this one has not ended after in time.

  That is `grace` seconds after a process has gone, which takes part in nothing more; or after a failure that this one
  has not noticed, once the time has passed in which all could agree on saving what they have.

  Args:
    processes: all of them.
    end: ends this process; called in a thread of its own.
    every: seconds between two looks.
    grace: seconds for this process to end by itself.
    rescue: seconds in which processes agree on saving.
  """
  ended = threading.Event()

  def watch() -> None:
    failed_at = gone_at = None
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store is gone, and jax ends this process
      while not ended.wait(every):
        failure = processes.failure()
        if failure is None:
          continue
        now = time.monotonic()
        failed_at = now if failed_at is None else failed_at
        gone_at = now if gone_at is None and processes.gone() else gone_at
        lost = gone_at is not None and now - gone_at >= grace
        unaware = not processes.noticed and now - failed_at >= rescue + grace
        if (lost or unaware) and not ended.is_set():
          end(failure)
          return

  thread = threading.Thread(target=watch, name="watch over processes", daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()


@contextlib.contextmanager
def deaths_watched(
  processes: Processes, lines: Lines, end: Callable[[ProcessFailed], None], *, every: float = EVERY / 5
) -> Iterator[None]:
  """Tells all others at once when one of them has died, by its connection to process 0.

  When process 0 has, which keeps the store of all, this calls `end` instead, in a thread of its own.

  Args:
    processes: all of them.
    lines: the connections; closed at the end of the block.
    end: ends this process, without the store.
    every: seconds between two looks if the watch is over.
  """

  def watch(ended: threading.Event) -> None:
    while not ended.is_set():
      lost = lines.lost(every)
      if lost is not None and not ended.is_set() and processes.is_writer:
        processes.lose(lost)
      elif lost is not None and not ended.is_set() and not processes.noticed:
        end(ProcessFailed("Process 0 has died without a word: its own log may say more.", lost))

  with beside(watch, "watch over deaths"):
    yield
  lines.close()


def leave_failed(processes: Processes, *, seconds: float = 2 * GRACE) -> None:
  """Leaves the others after a failure; the process that keeps the store waits until they have read why.

  `seconds`: at most; the store ends with process 0, and jax would then end the others with a status of its own.
  """
  processes.go()
  deadline = time.monotonic() + seconds
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    while processes.is_writer and len(processes.gone()) < processes.count - 1 and time.monotonic() < deadline:
      time.sleep(EVERY / 10)
