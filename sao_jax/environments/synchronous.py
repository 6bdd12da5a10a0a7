"""Synchronous environments, as gymnasium's are, behind the asynchronous protocol: each episode in a thread of its own.

A plain `reset`, `step` or `close` may compute, sleep and wait as it likes: the event loop goes on. All calls of an
episode are made in the same thread, the constructor too. A thread cannot be ended from outside: one that hangs is left
behind and counted, and its place goes to the next episode. `InProcesses` has processes, which can be killed.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Int

from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Environment, StepResult
from sao_jax.environments.wrappers import Wrapper
from sao_jax.episode import InfrastructureFailure, Prompt, Status
from sao_jax.errors import ConfigError
from sao_jax.rewards.queueing import waiting

T = TypeVar("T")

log = logging.getLogger(__name__)


class SynchronousEnvironment(Protocol):
  """One episode with plain methods, otherwise like `Environment`; inherit from it for the last two.

  Attributes:
    stop_ids: token ids that end an action; read after `reset`.
  """

  stop_ids: tuple[int, ...]

  def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    """Starts the episode; returns the prompt's token ids."""
    ...

  def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    """Answers the tokens that the policy sampled in one turn."""
    ...

  def on_truncated(self, status: Status) -> float:
    """Grades an episode that was cut before its end."""
    return 0.0

  def close(self) -> None:
    """Frees the episode's resources."""
    return


@dataclasses.dataclass(frozen=True)
class InThreads(Wrapper):
  """Settings of synchronous episodes in threads: `inner` makes `SynchronousEnvironment`s.

  For environments that wait. Those that compute share one interpreter with the event loop: run them `InProcesses`.

  >>> from sao_jax.environments.calculator import Calculator
  >>> class Shouting(SynchronousEnvironment):
  ...   stop_ids = (10,)
  ...
  ...   def reset(self, prompt):
  ...     return [1, 2, 3]
  ...
  ...   def step(self, action_ids):
  ...     return StepResult([], done=True, reward=float(len(action_ids)))
  >>> class Shouts(Calculator):
  ...   def make(self, tokenizer):
  ...     return Shouting()
  >>> async def play():
  ...   environment = InThreads(Shouts()).make(None)
  ...   await environment.reset(None)
  ...   result = await environment.step(np.array([7, 10]))
  ...   await environment.close()
  ...   return result.reward
  >>> asyncio.run(play())
  2.0
  """

  workers: int = 0  # episodes at the same time; the others wait for their turn, which no time-out counts; 0: all
  max_abandoned: int = 64  # threads that hang, beyond which no episode begins

  def __post_init__(self):
    check_workers(self.workers)
    if self.max_abandoned < 0:
      raise ConfigError("environment.max_abandoned", f"{self.max_abandoned} is negative.", "Use 0 or more.")

  @functools.cached_property
  def places(self) -> Places:
    """The places of all episodes of these settings."""
    return Places(self.name, self.workers, self.max_abandoned)

  def make(self, tokenizer: Tokenizer) -> ThreadedEpisode:
    return ThreadedEpisode(self.name, self.places, lambda: self.inner.make(tokenizer))


def check_workers(workers: int) -> None:
  """Refuses a negative number of workers."""
  if workers < 0:
    raise ConfigError("environment.workers", f"{workers} episodes at the same time are impossible.", "Use 0 or more.")


class Places:
  """Places of episodes with a thread: so many at a time, in the order in which they were asked for; thread-safe.

  Attributes:
    abandoned: threads that were given up in the middle of a call and have not come back.
  """

  def __init__(self, name: str, limit: int, max_abandoned: int | None = None):
    """`limit` 0 means any number of places, `max_abandoned` None any number of threads that hang."""
    self.abandoned = 0
    self._name, self._limit, self._max_abandoned = name, limit, max_abandoned
    self._lock, self._taken = threading.Lock(), 0
    self._queue: collections.deque[concurrent.futures.Future[None]] = collections.deque()

  def enter(self) -> concurrent.futures.Future[None]:
    """Asks for a place, which is there when the future is done.

    Raises:
      InfrastructureFailure: too many threads hang.
    """
    if self._max_abandoned is not None and self.abandoned > self._max_abandoned:
      problem = f"{self.abandoned} threads hang in its calls and cannot be ended; InProcesses could kill them"
      raise InfrastructureFailure(self._name, problem)
    place: concurrent.futures.Future[None] = concurrent.futures.Future()
    with self._lock:
      self._queue.append(place)
    self._fill()
    return place

  def leave(self) -> None:
    """Gives a place back."""
    with self._lock:
      self._taken -= 1
    self._fill()

  def abandon(self, what: str) -> None:
    """Gives the place of an episode back whose thread is still in a call that nobody waits for any more."""
    with self._lock:
      self.abandoned += 1
    log.warning("%s of environment %r was given up and still runs; such threads: %d", what, self._name, self.abandoned)
    self.leave()

  def recover(self) -> None:
    """Tells that an abandoned thread has come back."""
    with self._lock:
      self.abandoned -= 1

  def _fill(self) -> None:
    with self._lock:
      while self._queue and (not self._limit or self._taken < self._limit):
        place = self._queue.popleft()
        if place.set_running_or_notify_cancel():  # else nobody waits for it any more
          self._taken += 1
          place.set_result(None)


class ThreadedEpisode(Environment):
  """One episode in a thread of its own, from `reset` to `close`."""

  def __init__(self, name: str, places: Places, make: Callable[[], SynchronousEnvironment]):
    """`make` is called in the thread."""
    self.name = name
    self._places, self._make = places, make
    self._thread: _Thread | None = None
    self._inner: SynchronousEnvironment | None = None

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Those of the inner episode, which there is from `reset` on."""
    return tuple(self._inner.stop_ids) if self._inner is not None else ()

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    place = self._places.enter()
    try:
      with waiting():
        await asyncio.wrap_future(place)
    except asyncio.CancelledError:
      if not place.cancel():  # it had just been given
        self._places.leave()
      raise
    self._thread = _Thread(self.name)
    await self._begin()
    return await self._call("reset", self._inner.reset, prompt)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    return await self._call("step", self._inner.step, action_ids)

  async def on_truncated(self, status: Status) -> float:
    return await self._call("on_truncated", getattr(self._inner, "on_truncated", lambda status: 0.0), status)

  async def close(self) -> None:
    if self._thread is None:  # it never began, or was given up and closes itself
      return
    try:
      if self._inner is not None:
        await self._call("close", getattr(self._inner, "close", lambda: None))
    finally:
      if self._thread is not None:
        self._thread.stop()
        self._thread = None
        self._places.leave()

  async def _begin(self) -> None:
    self._inner = await self._call("making", self._make)

  async def _call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
    if self._thread is None:
      raise RuntimeError(f"{what} of an episode that was given up, or never began")
    future = self._thread.call(function, *arguments)
    try:
      return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
      self._give_up(what, future)
      raise

  def _give_up(self, what: str, future: concurrent.futures.Future[Any]) -> None:
    """Leaves a call behind, as of a rollout that was cut; the thread closes the episode should the call return."""
    thread, self._thread = self._thread, None

    def clean_up() -> None:
      try:
        if what == "close":  # it has just returned
          return
        made = self._inner is None and not future.cancelled() and future.exception() is None
        getattr(future.result() if made else self._inner, "close", lambda: None)()
      except BaseException:
        log.warning("an abandoned episode of environment %r was not closed", self.name, exc_info=True)
      finally:
        self._places.recover()

    self._places.abandon(what)
    thread.call(clean_up)
    thread.stop()


class _Thread:
  """A thread that makes calls one by one; no exit waits for it."""

  def __init__(self, name: str):
    self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable, tuple] | None] = queue.SimpleQueue()
    threading.Thread(target=self._run, name=f"episode of {name}", daemon=True).start()

  def call(self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
    """Makes a call after those before it."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    self._calls.put((future, function, arguments))
    return future

  def stop(self) -> None:
    """Ends the thread after the calls that it was given."""
    self._calls.put(None)

  def _run(self) -> None:
    while (call := self._calls.get()) is not None:
      future, function, arguments = call
      if not future.set_running_or_notify_cancel():
        continue  # nobody waits for it any more
      try:
        future.set_result(function(*arguments))
      except StopIteration as error:  # which no future can hold
        future.set_exception(RuntimeError(f"the call raised {error!r}"))
      except BaseException as error:  # whatever it is, it belongs to whoever waits
        future.set_exception(error)
