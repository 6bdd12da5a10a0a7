"""An asyncio event loop whose clock jumps to the next timer: minutes of waiting take no time."""

from __future__ import annotations

import asyncio
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
  """Its time passes only while everybody in it waits; what other threads do takes no time."""

  def __init__(self):
    super().__init__(_Selector(self))
    self.now = 0.0

  def time(self) -> float:
    return self.now


class _Selector(selectors.SelectSelector):
  def __init__(self, loop: VirtualTimeLoop):
    super().__init__()
    self._loop = loop

  def select(self, timeout: float | None = None) -> list:
    ready = super().select(0.01 if timeout is None else 0.0)  # None: only another thread can go on
    if not ready and timeout:
      self._loop.now += timeout
    return ready
