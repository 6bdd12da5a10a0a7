"""Work in a thread of its own that lasts as long as a `with` block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from absl import logging


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
  """Runs `work` in a daemon thread called `name`, and waits for it at the end of the block.

  `work` gets an event, and must return soon after it is set, which the end of the block does.
  """
  ended = threading.Event()
  thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def now_and_then(
  work: Callable[[], None], every: float, failed: str, last: tuple[type[Exception], ...] = ()
) -> Callable[[threading.Event], None]:
  """Returns what `beside` runs: `work`, every so many seconds, until the end.

  Args:
    work: the next time makes up for a failure.
    every: seconds between two times.
    failed: said of a failure, once in a row, with its error in place of %r.
    last: errors after which it is not tried again; they are said as they are.
  """

  def run(ended: threading.Event) -> None:
    failing = False
    while not ended.wait(every):
      try:
        work()
        failing = False
      except last as error:
        logging.error("%s", error)
        return
      except Exception as error:
        if not failing:
          logging.error(failed, error)
        failing = True

  return run
