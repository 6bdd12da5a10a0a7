"""The leading process of a sampler whose mesh spans several: its engine tells the followers every call beforehand.

The leader alone has sessions, requests and a scheduler. What it decides becomes calls of its engine. Each call that
starts a program is sent to the followers first, which make the same call on their part of the mesh (`follower`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sao_jax.errors import ConfigError
from sao_jax.interrupt import POLL
from sao_jax.parallel.group_channel import Channel, ProcessFailed
from sao_jax.parallel.params import Params
from sao_jax.sampler.engine import Dispatch, Engine, Prefill
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.group_plan import FREE, TURN, Call, WeightsName, encode
from sao_jax.sampler.prefill import Extension, Piece
from sao_jax.sampler.requests import ServiceStoppedError
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService

STOP_SECONDS = 5.0  # to wait for a thread that may wait for a device, when another process has failed


class Plan:
  """The order of a group's programs, which its leader decides as it goes; for any thread.

  Devices of several processes must get their programs in the same order, or they wait for each other for ever. So a
  call is sent and made by one thread at a time, and who asks for a turn comes before the sampler's next call.
  """

  def __init__(self, channel: Channel):
    """`channel` leads to the followers."""
    self.channel = channel
    self._noted: list[Call] = []
    self._held: dict[int, weakref.ref[jax.Array]] = {}
    self._free, self._busy, self._turns = threading.Condition(), False, 0

  def note(self, name: str, *arguments: Any) -> None:
    """Notes a call that starts no program: the followers make it before the next one that does."""
    with self._free:
      self._noted.append(Call(name, arguments))

  @contextlib.contextmanager
  def call(self, name: str, *arguments: Any) -> Iterator[None]:
    """Sends a call, and all that were noted, and holds up the others while the body makes it.

    Raises:
      ProcessFailed: a follower has failed.
    """
    with self._alone(lambda: not self._busy and not self._turns), self.channel.explained():
      self._send(Call(name, arguments))
      yield

  @contextlib.contextmanager
  def turn(self, name: str) -> Iterator[None]:
    """Gives the body, which starts a program of another kind, its place in the order."""
    with self._free:
      self._turns += 1
    try:
      with self._alone(lambda: not self._busy), self.channel.explained():
        self._send(Call(TURN, (name,)))
        yield
    finally:
      with self._free:
        self._turns -= 1
        self._free.notify_all()

  def hold(self, version: int, params: Params) -> None:
    """Remembers the weights that are this version, which all processes have; they free them when the leader does."""
    with self._free:
      self._held[version] = weakref.ref(jax.tree.leaves(params)[0])

  def name(self, weights: Weights | None) -> WeightsName | None:
    """The name of fixed weights.

    Raises:
      ConfigError: they are none that were published.
    """
    if weights is None:
      return None
    held = self._held.get(weights.version)
    if held is None or held() is not jax.tree.leaves(weights.params)[0]:
      problem = f"version {weights.version} was never published, and other processes hold parts of it."
      raise ConfigError("weights", problem, "Publish them, or sample with a policy that was.")
    return WeightsName(weights.version, tuple(np.asarray(jax.random.key_data(weights.key)).tolist()))

  @contextlib.contextmanager
  def _alone(self, free: Callable[[], bool]) -> Iterator[None]:
    with self._free:
      self._free.wait_for(free)
      self._busy = True
    try:
      yield
    finally:
      with self._free:
        self._busy = False
        self._free.notify_all()

  def _send(self, call: Call) -> None:
    with self._free:
      calls, self._noted = [*self._noted, call], []
      freed = [version for version, first in self._held.items() if first() is None]
      for version in freed:
        del self._held[version]
    self.channel.send(encode([*([Call(FREE, (freed,))] if freed else []), *calls]))


class LeadingEngine(Engine):
  """An engine that tells followers all that changes it."""

  def __init__(self, plan: Plan, *arguments: Any, **options: Any):
    """Arguments and options are those of `Engine`."""
    super().__init__(*arguments, **options)
    self._plan = plan
    plan.hold(self.version, self.params)

  def extend(self, extensions: Sequence[Extension], weights: Weights | None = None) -> list[Prefill]:
    """See `Engine`."""
    with self._plan.call("extend", extensions, self._plan.name(weights)):
      return super().extend(extensions, weights)

  def decode(
    self, num_steps: int, lengths: Mapping[int, int], weights: Weights | None = None, pieces: Sequence[Piece] = ()
  ) -> Dispatch:
    """See `Engine`."""
    with self._plan.call("decode", num_steps, lengths, self._plan.name(weights), pieces):
      return super().decode(num_steps, lengths, weights, pieces)

  def reserve(self, slot: int, length: int) -> bool:
    """See `Engine`."""
    done = super().reserve(slot, length)
    if done:
      self._plan.note("reserve", slot, length)
    return done

  def release(self, slot: int) -> None:
    """See `Engine`."""
    self._plan.note("release", slot)
    super().release(slot)

  def publish(self, params: Params, version: int) -> None:
    """See `Engine`. The followers have their part of these weights from `FollowingService.publish`."""
    self.check_params(params)
    with self._plan.call("publish", version):
      super().publish(params, version)

  def warm_up(self, *, prefixes: bool = True) -> None:
    """See `Engine`."""
    with self._plan.call("warm_up", prefixes):
      super().warm_up(prefixes=prefixes)


class LeadingService(SamplerService):
  """A service whose sampler spans several processes, in the one that leads."""

  def __init__(self, scheduler: Scheduler, plan: Plan):
    """`plan` is that of the scheduler's engine."""
    super().__init__(scheduler)
    self._plan = plan

  def start(self) -> LeadingService:
    """See `SamplerService`."""
    super().start()
    self._plan.channel.on_failure(self._lose)
    return self

  def stop(self) -> None:
    """See `SamplerService`. The followers end when they have done everything that was sent."""
    self._end(ServiceStoppedError("the sampler was stopped"))
    for lane in self._lanes:
      while lane.thread.is_alive() and self._plan.channel.error is None:
        lane.thread.join(POLL)
    if self.error is None:
      self._plan.channel.close()
    else:
      self._plan.channel.fail(self.error)

  def turn(self, name: str) -> contextlib.AbstractContextManager[None]:
    """See `SamplerService`."""
    return self._plan.turn(name)

  def publish(self, params: Params, version: int) -> None:
    """See `SamplerService`."""
    self._plan.hold(version, params)
    super().publish(params, version)

  def _end(self, error: BaseException) -> None:
    # A program fails, too, when another process dies in the middle of it: that is the reason to tell.
    super()._end(error if isinstance(error, ServiceStoppedError) else self._plan.channel.explain(error))

  def _lose(self, error: ProcessFailed) -> None:
    """Ends the service when a follower has failed; its thread may wait for a device that waits for that follower."""
    self._end(error)
    for lane in self._lanes:
      if lane.thread is threading.current_thread():
        continue  # it has met the failure itself, which ends it
      lane.thread.join(STOP_SECONDS)
      if lane.thread.is_alive():
        lane.scheduler.fail(error)
