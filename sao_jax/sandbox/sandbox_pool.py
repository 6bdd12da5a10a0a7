"""A pool of sandboxes: so many at once and no more, some of them started before anybody asks."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from sao_jax.errors import ConfigError
from sao_jax.rewards.queueing import waiting


class Closable(Protocol):
  """A sandbox, or what holds one, as a `PythonSession` does."""

  async def close(self) -> None: ...


Lent = TypeVar("Lent", bound=Closable)


class SandboxPool(Generic[Lent]):
  """Lends fresh sandboxes or sessions, each one once; to be used on one event loop.

  >>> from sao_jax.sandbox.bubblewrap import LocalSandbox
  >>> async def greet():
  ...   pool = SandboxPool(LocalSandbox.start, size=2, warm=1)
  ...   async with pool.sandbox() as sandbox:
  ...     result = await sandbox.run(["echo", "hello"], timeout=60.0)
  ...   await pool.close()
  ...   return result.stdout
  >>> asyncio.run(greet())
  b'hello\\n'
  """

  def __init__(self, start: Callable[[], Awaitable[Lent]], *, size: int = 32, warm: int = 2):
    """Prepares the pool; nothing is started before the first sandbox is asked for.

    Args:
      start: makes a sandbox, as `LocalSandbox.start` does. What it raises reaches whoever asked.
      size: the largest number of sandboxes, waiting ones included.
      warm: how many wait, already started, as long as `size` allows.

    Raises:
      ConfigError: for numbers that cannot work.
    """
    if size < 1 or not 0 <= warm <= size:
      raise ConfigError("SandboxPool", f"{warm} of {size} sandboxes cannot wait.", "Use 0 <= warm <= size, size >= 1.")
    self._start, self._size, self._most_warm = start, size, warm
    self._free = asyncio.Semaphore(size)
    self._warm: collections.deque[asyncio.Task[Lent]] = collections.deque()
    self._closing: set[asyncio.Task[None]] = set()
    self._closed = False
    self._counts = dict.fromkeys(("asked", "started", "failed", "lent"), 0)

  @contextlib.asynccontextmanager
  async def sandbox(self) -> AsyncIterator[Lent]:
    """Lends a sandbox for a block of code, and closes it at the end; others wait for their turn meanwhile."""
    sandbox = await self.acquire()
    try:
      yield sandbox
    finally:
      await self.release(sandbox)

  async def acquire(self) -> Lent:
    """Lends a sandbox until `release`; the wait for a free place is a turn in a queue, and not charged to the call."""
    with waiting():
      await self._free.acquire()
    try:
      if self._closed:
        raise RuntimeError("the pool of sandboxes has been closed")
      self._counts["asked"] += 1
      self._counts["lent"] += 1
      task = self._warm.popleft() if self._warm else self._begin()
      try:
        sandbox = await asyncio.shield(task)
      except asyncio.CancelledError:
        self._retire(task)
        raise
    except BaseException:
      self._give_back()
      raise
    self._refill()
    return sandbox

  async def release(self, sandbox: Lent) -> None:
    """Closes a lent sandbox, even if this call is cancelled, and makes its place free."""

    async def close() -> None:
      try:
        await sandbox.close()
      finally:
        self._give_back()
        self._refill()

    await asyncio.shield(self._keep(close()))

  async def close(self) -> None:
    """Ends the sandboxes that wait, and those that are being closed; nothing is lent any more."""
    self._closed = True
    while self._warm:
      self._retire(self._warm.popleft())
    while self._closing:
      await asyncio.gather(*self._closing, return_exceptions=True)

  def stats(self) -> dict[str, int]:
    """Counts sandboxes: asked for, started, failed to start; lent and waiting at this moment."""
    return {**self._counts, "warm": len(self._warm)}

  def _begin(self) -> asyncio.Task[Lent]:
    async def start() -> Lent:
      try:
        sandbox = await self._start()
      except BaseException:
        self._counts["failed"] += 1
        raise
      self._counts["started"] += 1
      return sandbox

    task = asyncio.ensure_future(start())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # one that nobody asks for says nothing
    return task

  def _refill(self) -> None:
    while not self._closed and len(self._warm) < min(self._most_warm, self._size - self._counts["lent"]):
      self._warm.append(self._begin())

  def _give_back(self) -> None:
    self._counts["lent"] = max(0, self._counts["lent"] - 1)
    self._free.release()

  def _retire(self, task: asyncio.Task[Lent]) -> None:
    """Closes a sandbox that may still be starting."""

    async def close() -> None:
      with contextlib.suppress(Exception):  # it has not started, and is nobody's loss
        await (await task).close()

    self._keep(close())

  def _keep(self, work: Any) -> asyncio.Task[None]:
    task = asyncio.ensure_future(work)
    self._closing.add(task)
    task.add_done_callback(self._closing.discard)
    return task
