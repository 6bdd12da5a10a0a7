"""Requests in flight: their greatest number, and their end when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from sao_jax.gateway.exchange import UNAVAILABLE, RequestRefused


class Gate:
  """Admits requests within one event loop."""

  def __init__(self, most: Callable[[], int]):
    """Admits so many at a time; `most` is asked at each request."""
    self._most, self._tasks = most, set()
    self.closing = False

  @contextlib.contextmanager
  def admitted(self) -> Iterator[None]:
    """Counts the request of the current task as long as it lasts.

    Raises:
      RequestRefused: there are too many, or the server stops, which cancels those inside too.
    """
    if self.closing:
      raise self.stopped()
    if len(self._tasks) >= (most := self._most()):
      problem = f"{most} requests are in flight already; try again."
      raise RequestRefused(429, problem, kind="rate_limit_error", code="rate_limit_exceeded")
    task = asyncio.current_task()
    self._tasks.add(task)
    try:
      yield
    except asyncio.CancelledError:
      if not self.closing:
        raise
      task.uncancel()
      raise self.stopped() from None
    finally:
      self._tasks.discard(task)

  async def close(self, grace: float) -> None:
    """Admits nothing more, and gives those inside `grace` seconds to end before it cancels them."""
    self.closing = True
    if self._tasks:
      await asyncio.wait(set(self._tasks), timeout=grace)
    for task in self._tasks:
      task.cancel()

  @staticmethod
  def stopped() -> RequestRefused:
    """The refusal of a server that stops."""
    return RequestRefused(503, "The server is being stopped.", kind=UNAVAILABLE, code="server_stopped")
