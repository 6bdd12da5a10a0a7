"""Runs rollouts: a fresh environment and sampler session for every attempt, bounded retries, all closed again."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from sao_jax.environments.base import Environment
from sao_jax.episode import EnvironmentFailure, Trajectory
from sao_jax.rollout.calls import call_environment, make_environment
from sao_jax.rollout.entries import Rollout
from sao_jax.rollout.loop_clock import LoopClock
from sao_jax.rollout.outages import Attempt, Outages
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.sampler.requests import Completion, GenerateRequest

log = logging.getLogger(__name__)


class Sampler(Protocol):
  """The part of a sampler that a rollout needs; all of it may be called from any thread."""

  def new_session(self) -> int: ...
  async def generate(self, request: GenerateRequest) -> Completion: ...
  def release(self, session_id: int) -> None: ...


class FirstCall:
  """Passes its first call on; versions never decrease along a trajectory, so the first one is its oldest."""

  def __init__(self, function: Callable[[int], None]):
    self._function, self._called = function, False

  def __call__(self, version: int) -> None:
    if not self._called:
      self._called = True
      self._function(int(version))


class EpisodeRunner:
  """Runs any number of rollouts at the same time, in one event loop.

  Attributes:
    closing: the tasks that close environments; an episode's end does not wait for its own.
  """

  def __init__(
    self,
    make_environment: Callable[[], Environment],
    sampler: Sampler,
    limits: EpisodeLimits,
    *,
    temperature: float = 1.0,
    timeout: float = 30.0,
    retries: int = 0,
    outages: Outages | None = None,
    clock: LoopClock | None = None,
    on_activity: Callable[[], None] = lambda: None,
    on_retry: Callable[[], None] = lambda: None,
    on_posed: Callable[[], None] = lambda: None,
    on_oldest: Callable[[int, int | None], None] = lambda rollout_id, version: None,
  ):
    """Args:
    make_environment: a fresh environment for one episode.
    sampler: generates actions; its exceptions pass through unchanged.
    limits: what cuts an episode.
    temperature: of sampling.
    timeout: seconds for one call of an environment.
    retries: further attempts at a rollout after a failure that is retryable.
    outages: decides when an attempt may begin, and learns from its end; None makes one.
    clock: measures the event loop; None makes one.
    on_activity: called whenever the sampler is called and has answered, and when an attempt has failed.
    on_retry: called before every further attempt.
    on_posed: called when an environment has posed its prompt, and the policy may act.
    on_oldest: called with the id of a rollout and the version of its first sampled token, as soon as that is known,
      from any thread; with None when an attempt begins.
    """
    self._make_environment, self._sampler, self._limits = make_environment, sampler, limits
    self._temperature, self._timeout, self._retries = temperature, timeout, retries
    self._outages, self._clock = outages or Outages(), clock or LoopClock()
    self._on_activity, self._on_retry, self._on_posed, self._on_oldest = on_activity, on_retry, on_posed, on_oldest
    self.closing: set[asyncio.Task] = set()  # an event loop holds tasks only weakly

  async def run(self, rollout: Rollout) -> Trajectory:
    """One rollout. Raises what `run_episode` raises, after the last attempt."""
    self._clock.start()
    number = 0  # attempts before this one
    while True:
      try:
        async with self._outages.attempt(rollout.prompt.key.environment, rollout.rollout_id, number) as attempt:
          return await self._attempt(rollout, attempt)
      except EnvironmentFailure as failure:
        self._on_activity()
        if not failure.retryable or number >= self._retries:
          raise
        log.info("rollout %d is tried again: %s", rollout.rollout_id, failure)
      number += 1
      self._on_retry()

  async def _attempt(self, rollout: Rollout, attempt: Attempt) -> Trajectory:
    # Nothing of an attempt before is used again.
    name = rollout.prompt.key.environment
    close = functools.partial(self._begin_closing, rollout.rollout_id, name)
    environment = make_environment(self._make_environment, name, self._timeout, self._clock, close=close)
    session_id = self._sampler.new_session()
    self._on_oldest(rollout.rollout_id, None)
    try:
      return await run_episode(
        environment,
        rollout.prompt,
        self._generate_in(attempt),
        rollout.rollout_id,
        self._limits,
        sample=rollout.sample,
        session_id=session_id,
        temperature=self._temperature,
        timeout=self._timeout,
        clock=self._clock,
      )
    finally:
      self._sampler.release(session_id)
      close(environment)

  def _generate_in(self, attempt: Attempt) -> Callable[[GenerateRequest], Awaitable[Completion]]:
    turns = itertools.count()
    on_oldest = FirstCall(functools.partial(self._on_oldest, attempt.rollout_id))

    async def generate(request: GenerateRequest) -> Completion:
      # The first action follows the prompt, every further one an answer of the environment.
      if next(turns):
        self._outages.answered(attempt)
      else:
        self._on_posed()

      self._on_activity()
      completion = await self._sampler.generate(dataclasses.replace(request, on_sampled=on_oldest))
      self._on_activity()
      if len(completion.policy_versions):  # not every sampler reports while it samples
        on_oldest(completion.policy_versions[0])
      return completion

    return generate

  def _begin_closing(self, rollout_id: int, name: str, environment: Environment) -> None:
    """Closes an environment in a task of its own: a slow close holds no rollout's place."""
    closing = asyncio.create_task(self._close(environment, name), name=f"closing of rollout {rollout_id}")
    self.closing.add(closing)
    closing.add_done_callback(self._closed)

  def _closed(self, closing: asyncio.Task) -> None:
    self.closing.discard(closing)
    if not closing.cancelled():
      closing.result()  # what it raised is not the environment's: the event loop reports it

  async def _close(self, environment: Environment, name: str) -> None:
    try:
      await call_environment(lambda: environment.close(), name, "close", self._timeout, self._clock)
    except EnvironmentFailure as failure:
      log.warning("an environment was not closed: %s", failure, exc_info=failure.__cause__ is not None)
