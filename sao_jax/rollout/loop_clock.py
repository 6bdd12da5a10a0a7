"""A clock that stops while the event loop stands still: a call that blocks the loop is charged for it, and nobody else.

An event loop serves one coroutine at a time. While one of them computes or sleeps without awaiting, no answer of
another can be received, so a time-out on the wall's clock would blame whoever waits. `LoopClock` beats in the loop and
takes every late beat for a standstill; `Call` adds to that what one call held the loop for itself.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

from sao_jax.rewards.queueing import METER, QueueMeter

T = TypeVar("T")

log = logging.getLogger(__name__)

HEARTBEAT = 0.02  # seconds between two beats; a standstill is measured to within this
LONG = 1.0  # seconds; a longer standstill is warned about
REPEAT = 60.0  # seconds before the same name is warned about again

_current: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


class LoopClock:
  """Counts the seconds in which an event loop stood still, and says who held it; belongs to the loop's thread.

  >>> import time
  >>> async def block():
  ...   clock = LoopClock().start()
  ...   call = Call("step of environment 'slow'", clock)
  ...   await call.run(lambda: asyncio.sleep(0.2))  # the loop is free
  ...   before = clock.stalled
  ...   time.sleep(0.2)  # the loop is not, and it was not the call
  ...   return round(before, 1), round(clock.stalled, 1), round(call.elapsed, 1)
  >>> asyncio.run(block())
  (0.0, 0.2, 0.2)
  """

  def __init__(self) -> None:
    self._loop: asyncio.AbstractEventLoop | None = None
    self._due, self._stalled, self._longest = math.inf, 0.0, 0.0

    # Who held the loop since the last beat, and who was warned about: when, and how often in silence since.
    self._held: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    self._warned: dict[str, float] = {}
    self._unsaid: collections.Counter[str] = collections.Counter()

  def start(self) -> LoopClock:
    """Begins to beat in the running event loop, unless it does already; returns the clock itself."""
    loop = asyncio.get_running_loop()
    if self._loop is not loop:
      self._loop = loop
      loop.set_task_factory(_make_task)
      self._schedule()
    return self

  def time(self) -> float:
    """The event loop's own time in seconds, which goes on while the loop stands still."""
    return self._loop.time()

  @property
  def stalled(self) -> float:
    """Seconds in which the loop stood still since the start, those of the present standstill included."""
    return self._stalled + max(0.0, self.time() - self._due)

  def take_longest(self) -> float:
    """Returns the seconds of the longest standstill since the last time that this was asked; from any thread."""
    longest, self._longest = self._longest, 0.0
    return longest

  @contextlib.contextmanager
  def holding(self, name: str) -> Iterator[None]:
    """Times synchronous work in the loop, to name it should the loop have stood still."""
    began = self.time()
    try:
      yield
    finally:
      self._held[name].append(self.time() - began)

  def _schedule(self) -> None:
    self._due = self.time() + HEARTBEAT
    self._loop.call_at(self._due, self._beat)

  def _beat(self) -> None:
    late = max(0.0, self.time() - self._due)
    self._stalled += late
    self._longest = max(self._longest, late)
    if late > LONG:
      self._warn(late)
    self._held.clear()
    self._schedule()

  def _warn(self, seconds: float) -> None:
    """Says, at most once a minute for each name, how long the loop stood still and who held it longest."""
    name = max(self._held, key=lambda name: sum(self._held[name]), default="")
    held = sum(self._held[name]) if name else 0.0
    if held < seconds / 2:
      name = ""
    if self.time() - self._warned.get(name, -math.inf) < REPEAT:
      self._unsaid[name] += 1
      return

    # What held it, how often in this standstill, and how often it was not said.
    who = f"{name} held it for {held:.1f} s in {len(self._held[name])} stretches" if name else "nobody knows by whom"
    more = f", and {self._unsaid[name]} times more since the last warning" if self._unsaid[name] else ""
    self._warned[name], self._unsaid[name] = self.time(), 0
    log.warning(
      "the event loop stood still for %.1f s, and with it every episode: %s%s.%s",
      seconds,
      who,
      more,
      REMEDY * bool(name),
    )


REMEDY = (
  " What computes or waits without `await` belongs into a thread or a process: "
  "sao_jax.environments.InThreads and InProcesses run synchronous environments."
)


class Call:
  """One call of an environment: how long it has taken of the time that the event loop could serve it.

  Attributes:
    name: the call's, as warnings say it.
    held: seconds in which the call itself, or a task that it made, kept the loop from serving others.
  """

  def __init__(self, name: str, clock: LoopClock):
    self.name, self.held = name, 0.0
    self._clock, self._began, self._stalled = clock, clock.time(), clock.stalled
    self._queue = QueueMeter()

  @property
  def served(self) -> float:
    """Seconds since the call began in which the loop was free, and the call not waiting for its turn at a pool."""
    return max(0.0, self._wall - (self._clock.stalled - self._stalled) - self._queue.seconds)

  @property
  def elapsed(self) -> float:
    """Seconds that are charged to the call: those that served it, and those in which it held the loop."""
    return min(self._wall, self.served + self.held)

  @property
  def _wall(self) -> float:
    return self._clock.time() - self._began

  @contextlib.contextmanager
  def holding(self) -> Iterator[None]:
    """Times a synchronous stretch of the call."""
    began = self._clock.time()
    try:
      with self._clock.holding(self.name):
        yield
    finally:
      self.held += self._clock.time() - began

  def run_now(self, function: Callable[[], T]) -> T:
    """Returns what `function` does, which holds the loop; callbacks and tasks that it leaves behind are the call's."""
    token = _current.set(self)
    try:
      with self.holding():
        return function()
    finally:
      _current.reset(token)

  async def run(self, function: Callable[[], Awaitable[T]]) -> T:
    """Awaits what `function` returns, and times every stretch of it; for a task of its own."""
    _current.set(self)
    METER.set(self._queue)
    return await _Stretches(_awaited(function), self)


class _Stretches(Generator[Any, Any, Any]):
  """Steps a coroutine on behalf of its task, and times every step: from one `await` that waits to the next."""

  def __init__(self, coroutine: Coroutine[Any, Any, T] | Generator[Any, Any, T], call: Call):
    self._coroutine, self._call = coroutine, call

  def __await__(self) -> Generator[Any, Any, Any]:
    return self

  @property
  def cr_await(self) -> Any:
    """The coroutine, for those who follow a task to the place where it waits."""
    return self._coroutine

  def send(self, value: Any) -> Any:
    with self._call.holding():
      return self._coroutine.send(value)

  def throw(self, *error: Any) -> Any:
    with self._call.holding():
      return self._coroutine.throw(*error)


async def _awaited(function: Callable[[], Awaitable[T]]) -> T:
  return await function()


async def _timed(coroutine: Coroutine[Any, Any, T], call: Call) -> T:
  return await _Stretches(coroutine, call)


def call_of(handle: asyncio.Handle | None) -> Call | None:
  """Returns the call that a callback was scheduled by; None for anybody else's."""
  get_context = getattr(handle, "get_context", None)  # since Python 3.12
  context = get_context() if get_context is not None else getattr(handle, "_context", None)
  return None if context is None else context.get(_current)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
  """Makes a task; one that a call makes is timed on the call's account."""
  call = _current.get()
  return asyncio.Task(coroutine if call is None else _timed(coroutine, call), loop=loop, **options)
