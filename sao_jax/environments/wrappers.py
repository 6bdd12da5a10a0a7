"""Faults on purpose around any environment: raise, hang, slow, garbage, killed process. A run survives them all.

dataclasses.replace(config, environment=Chaos(config.environment, raises=0.05, hangs=0.02))
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Demonstration, Environment, EnvironmentSpec, StepResult
from sao_jax.episode import Prompt, PromptKey, Status
from sao_jax.errors import ConfigError

T = TypeVar("T")


class Fault(enum.Enum):
  """What goes wrong in an episode."""

  RAISE = "raise"  # an exception that nobody knows
  HANG = "hang"  # the call never returns
  SLOW = "slow"  # the call returns late
  GARBAGE = "garbage"  # the call returns what it should not
  KILL = "kill"  # a process that does the call's work is killed


class Place(enum.Enum):
  """Where it goes wrong: in the call that ..."""

  RESET = "reset"  # starts the episode
  STEP = "step"  # answers the first action
  REWARD = "reward"  # gives the reward: the last step, or the grading of an episode that was cut


@dataclasses.dataclass(frozen=True)
class Chaos:
  """Wraps another environment's settings; the rates are shares of episodes, each of which has one fault at most.

  Which fault an episode has, and where, depends on `seed` and its prompt's key alone: so does every attempt at it.
  """

  inner: EnvironmentSpec
  raises: float = 0.0
  hangs: float = 0.0
  slow: float = 0.0
  garbage: float = 0.0
  kills: float = 0.0
  slow_seconds: float = 1.0
  places: tuple[str, ...] = ("reset", "step", "reward")  # equally likely
  seed: int = 0

  def __post_init__(self):
    for name, rate in self.rates().items():
      if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"environment.{name}", f"{rate} is no share of episodes.", "Use 0 to 1.")
    if sum(self.rates().values()) > 1.0:
      raise ConfigError("environment.raises", "the rates add up to more than 1.", "Lower them: one fault per episode.")
    if not 0.0 <= self.slow_seconds < math.inf:
      raise ConfigError(
        "environment.slow_seconds", f"{self.slow_seconds} seconds cannot be waited.", "Use a finite number >= 0."
      )
    if not self.places or not set(self.places) <= {place.value for place in Place}:
      raise ConfigError("environment.places", f"{self.places} is wrong.", "Name some of reset, step and reward.")

  @property
  def name(self) -> str:
    return self.inner.name

  def tokenizer(self) -> Tokenizer:
    return self.inner.tokenizer()

  def make(self, tokenizer: Tokenizer) -> ChaosEpisode:
    return ChaosEpisode(self, self.inner.make(tokenizer))

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    return self.inner.prompts(tokenizer, split, seed)

  @property
  def demonstration(self) -> Callable[[Prompt, Tokenizer, np.random.Generator], Demonstration]:
    """The inner environment's; there is no such attribute where that has no expert."""
    return self.inner.demonstration

  def rates(self) -> dict[str, float]:
    """The rate of each fault, by field, in the order of `Fault`."""
    return {name: getattr(self, name) for name in ("raises", "hangs", "slow", "garbage", "kills")}

  def fault(self, key: PromptKey) -> tuple[Fault, Place] | None:
    """What goes wrong in the episodes of a prompt, and where; None where nothing does."""
    digest = hashlib.sha256(repr((self.seed, *key)).encode("utf-8")).digest()
    draw, place = np.random.default_rng(int.from_bytes(digest[:16], "big")).random(2)
    for fault, rate in zip(Fault, self.rates().values(), strict=True):
      if draw < rate:
        return fault, Place(self.places[int(place * len(self.places))])
      draw -= rate
    return None


class ChaosEpisode(Environment):
  """The inner episode, in which something may go wrong."""

  def __init__(self, settings: Chaos, inner: Environment):
    self.name, self.stop_ids = inner.name, inner.stop_ids
    self._settings, self._inner = settings, inner

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._due = self._settings.fault(prompt.key)
    return await self._call(Place.RESET, lambda: self._inner.reset(prompt), garbage="not token ids")

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    result = await self._call(Place.STEP, lambda: self._inner.step(action_ids), garbage=StepResult([-1], False))
    if not result.done:
      return result
    garbage = dataclasses.replace(result, reward=math.nan)
    return await self._call(Place.REWARD, lambda: _return(result), garbage=garbage)

  async def on_truncated(self, status: Status) -> float:
    return await self._call(Place.REWARD, lambda: self._inner.on_truncated(status), garbage=math.nan)

  async def close(self) -> None:
    await self._inner.close()

  async def _call(self, place: Place, call: Callable[[], Awaitable[T]], *, garbage: Any) -> T:
    fault = None
    if self._due is not None and self._due[1] is place:
      (fault, _), self._due = self._due, None
    if fault is Fault.RAISE:
      raise RuntimeError(f"chaos in {place.value}")
    if fault is Fault.HANG:
      await asyncio.Event().wait()
    if fault is Fault.SLOW:
      await asyncio.sleep(self._settings.slow_seconds)
    if fault is Fault.GARBAGE:
      return garbage
    if fault is Fault.KILL:
      await _ask_a_process_that_is_killed(place)
    return await call()


async def _return(value: T) -> T:
  return value


async def _ask_a_process_that_is_killed(place: Place) -> None:
  """Raises what the client of a worker process sees when the process dies before it has answered."""
  process = await asyncio.create_subprocess_exec(
    *(sys.executable, "-S", "-c", "input()"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
  )
  process.kill()
  answer = await process.stdout.read()
  status = await process.wait()
  raise ConnectionResetError(f"chaos in {place.value}: a process answered {answer!r} and ended with status {status}")


@dataclasses.dataclass(frozen=True)
class SimulatedLatency:
  """Wraps another environment's settings; every step first waits exp(N(mu, sigma^2)) seconds, mean `mean`.

  The waits of an episode depend on `seed` and its prompt's key alone.
  """

  inner: EnvironmentSpec
  mean: float = 1.0  # seconds per step
  sigma: float = 1.0  # of the logarithm: 0 is constant, 1 has a 99th percentile of 6 times the mean
  seed: int = 0

  def __post_init__(self):
    if not (self.mean >= 0.0 and math.isfinite(self.mean)):
      raise ConfigError("environment.mean", f"{self.mean} seconds cannot be waited.", "Use a finite mean >= 0.")
    if not 0.0 <= self.sigma <= 5.0:
      raise ConfigError("environment.sigma", f"{self.sigma} is out of range.", "Use a sigma between 0 and 5.")

  @property
  def name(self) -> str:
    return self.inner.name

  def tokenizer(self) -> Tokenizer:
    return self.inner.tokenizer()

  def make(self, tokenizer: Tokenizer) -> SimulatedLatencyEpisode:
    return SimulatedLatencyEpisode(self, self.inner.make(tokenizer))

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    return self.inner.prompts(tokenizer, split, seed)

  @property
  def demonstration(self) -> Callable[[Prompt, Tokenizer, np.random.Generator], Demonstration]:
    """The inner environment's; there is no such attribute where that has no expert."""
    return self.inner.demonstration

  def delays(self, key: PromptKey) -> np.random.Generator:
    """The source of an episode's waits."""
    digest = hashlib.sha256(repr((self.seed, *key)).encode("utf-8")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))

  def draw(self, delays: np.random.Generator) -> float:
    """The next wait, in seconds."""
    return self.mean * math.exp(self.sigma * delays.standard_normal() - self.sigma**2 / 2)


class SimulatedLatencyEpisode(Environment):
  """The inner episode, later."""

  def __init__(self, settings: SimulatedLatency, inner: Environment):
    self.name, self.stop_ids = inner.name, inner.stop_ids
    self._settings, self._inner = settings, inner

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._delays = self._settings.delays(prompt.key)
    return await self._inner.reset(prompt)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    await asyncio.sleep(self._settings.draw(self._delays))
    return await self._inner.step(action_ids)

  async def on_truncated(self, status: Status) -> float:
    return await self._inner.on_truncated(status)

  async def close(self) -> None:
    await self._inner.close()
