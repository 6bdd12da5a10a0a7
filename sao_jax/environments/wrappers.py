"""Environments around other environments: faults on purpose (`Chaos`) and slow answers (`SimulatedLatency`).

Both change an episode, never its task: prompts, tokenizer and expert are those of the inner environment. Everything
random depends on the wrapper's seed and the prompt's key alone, so every run and every attempt meets the same trouble,
but for waits that are not to be alike.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import math
import sys
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from sao_jax.config import NonNegativeInt
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Demonstration, Environment, EnvironmentSpec, StepResult
from sao_jax.episode import Prompt, PromptKey, Status
from sao_jax.errors import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Wrapper:
  """Settings of an environment around another one; subclasses add their own, and make the episodes."""

  inner: EnvironmentSpec

  @property
  def name(self) -> str:
    return self.inner.name

  def tokenizer(self) -> Tokenizer:
    return self.inner.tokenizer()

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    return self.inner.prompts(tokenizer, split, seed)

  @property
  def demonstration(self) -> Callable[[Prompt, Tokenizer, np.random.Generator], Demonstration]:
    """The inner environment's expert; an inner environment without one makes this an AttributeError."""
    return self.inner.demonstration

  @property
  def states(self) -> Callable[[Any, Any], list[Hashable]]:
    """The inner environment's states of an episode; one that knows none makes this an AttributeError."""
    return self.inner.states


class WrappedEpisode(Environment):
  """An episode that hands every call on to the inner one; subclasses change some of the calls."""

  def __init__(self, inner: Environment):
    self.name = inner.name
    self._inner = inner

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Those of the inner episode, which may know them only once it has begun."""
    return self._inner.stop_ids

  @property
  def texts(self) -> Mapping[str, str]:
    """Those of the inner episode, see `episode_texts`."""
    return getattr(self._inner, "texts", {})

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    return await self._inner.reset(prompt)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    return await self._inner.step(action_ids)

  async def on_truncated(self, status: Status) -> float:
    return await self._inner.on_truncated(status)

  async def close(self) -> None:
    await self._inner.close()


def generator_of(seed: int, key: PromptKey) -> np.random.Generator:
  """Makes the random numbers of one prompt's episodes: the same for the same seed and key, in any process."""
  digest = hashlib.sha256(repr((seed, *key)).encode("utf-8")).digest()
  return np.random.default_rng(int.from_bytes(digest[:16], "big"))


class Fault(enum.Enum):
  """A kind of fault, in the order of the rates of `Chaos`."""

  RAISE = "raise"  # the call raises an exception of an unknown kind
  HANG = "hang"  # the call never returns
  SLOW = "slow"  # the call returns late
  GARBAGE = "garbage"  # the call returns a value that it must not return
  KILL = "kill"  # a process that does the call's work is killed


class FaultPlace(enum.Enum):
  """The call in which a fault shows."""

  RESET = "reset"  # the call that starts the episode
  STEP = "step"  # the call that answers the first action
  REWARD = "reward"  # the call that gives the reward: the last step, or the grading of an episode that was cut


@dataclasses.dataclass(frozen=True)
class Chaos(Wrapper):
  """Settings of faults on purpose. The rates are shares of episodes; an episode has one fault at most.

  The fault of an episode, and its place, depend on `seed` and its prompt's key alone: every attempt meets it again.

  >>> from sao_jax.environments.calculator import Calculator
  >>> chaos = Chaos(Calculator(), raises=0.5, places=("step",))
  >>> chaos.fault(PromptKey("calculator", 0, 0)) is None
  True
  >>> chaos.fault(PromptKey("calculator", 1, 0))
  (<Fault.RAISE: 'raise'>, <FaultPlace.STEP: 'step'>)
  """

  raises: float = 0.0
  hangs: float = 0.0
  slow: float = 0.0
  garbage: float = 0.0
  kills: float = 0.0
  slow_seconds: float = 1.0
  places: tuple[str, ...] = ("reset", "step", "reward")  # equally likely
  seed: NonNegativeInt = 0

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
    if not self.places or not set(self.places) <= {place.value for place in FaultPlace}:
      raise ConfigError("environment.places", f"{self.places} is wrong.", "Name some of reset, step and reward.")

  def make(self, tokenizer: Tokenizer) -> ChaosEpisode:
    return ChaosEpisode(self, self.inner.make(tokenizer))

  def rates(self) -> dict[str, float]:
    """Lists the rate of each fault by field, in the order of `Fault`."""
    return {name: getattr(self, name) for name in ("raises", "hangs", "slow", "garbage", "kills")}

  def fault(self, key: PromptKey) -> tuple[Fault, FaultPlace] | None:
    """Draws the fault of a prompt's episodes and its place; None for episodes without a fault."""
    draw, place = generator_of(self.seed, key).random(2)
    for fault, rate in zip(Fault, self.rates().values(), strict=True):
      if draw < rate:
        return fault, FaultPlace(self.places[int(place * len(self.places))])
      draw -= rate
    return None


class ChaosEpisode(WrappedEpisode):
  """The inner episode, in which one call may go wrong."""

  def __init__(self, settings: Chaos, inner: Environment):
    super().__init__(inner)
    self._settings = settings

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._due = self._settings.fault(prompt.key)
    return await self._call(FaultPlace.RESET, lambda: self._inner.reset(prompt), garbage="not token ids")

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    result = await self._call(FaultPlace.STEP, lambda: self._inner.step(action_ids), garbage=StepResult([-1], False))
    if not result.done:
      return result
    garbage = dataclasses.replace(result, reward=math.nan)
    return await self._call(FaultPlace.REWARD, lambda: _return(result), garbage=garbage)

  async def on_truncated(self, status: Status) -> float:
    return await self._call(FaultPlace.REWARD, lambda: self._inner.on_truncated(status), garbage=math.nan)

  async def _call(self, place: FaultPlace, call: Callable[[], Awaitable[T]], *, garbage: Any) -> T:
    """Makes the call, with the episode's fault if that is due here; `garbage` is the wrong value of this call."""
    fault = None
    if self._due is not None and self._due[1] is place:
      (fault, _), self._due = self._due, None  # once per episode

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


async def _ask_a_process_that_is_killed(place: FaultPlace) -> None:
  """Raises the error that a client sees when a worker process dies before it has answered."""
  process = await asyncio.create_subprocess_exec(
    *(sys.executable, "-S", "-c", "input()"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
  )
  process.kill()
  answer = await process.stdout.read()
  status = await process.wait()
  raise ConnectionResetError(f"chaos in {place.value}: a process answered {answer!r} and ended with status {status}")


@dataclasses.dataclass(frozen=True)
class SimulatedLatency(Wrapper):
  """Settings of slow answers: every step first waits exp(N(mu, sigma^2)) seconds, `mean` on average.

  The waits of an episode depend on `seed` and its prompt's key alone, so that those of a group wait alike, unless each
  is to wait for itself: then nobody can repeat them, and a group waits for its slowest. With a `tick` answers come
  together, as from a server that works in rounds: a sampler then has larger batches, which costs it less.

  >>> from sao_jax.environments.calculator import Calculator
  >>> settings = SimulatedLatency(Calculator(), mean=2.0, sigma=0.0)  # constant waits
  >>> settings.draw(settings.delays(PromptKey("calculator", 0, 0)))
  2.0
  """

  mean: float = 1.0  # seconds per step
  sigma: float = 1.0  # spread of the wait's logarithm: 0 is constant, 1 has a 99th percentile of 6 times the mean
  seed: NonNegativeInt = 0
  alike: bool = True  # rollouts of a prompt wait alike, and in any run; False: each for itself
  tick: float = 0.0  # answers come at multiples of so many seconds, the next one behind their wait; 0: at any time

  def __post_init__(self):
    if not (self.tick >= 0.0 and math.isfinite(self.tick)):
      raise ConfigError("environment.tick", f"{self.tick} seconds are no tick.", "Use a finite tick >= 0.")
    if not (self.mean >= 0.0 and math.isfinite(self.mean)):
      raise ConfigError("environment.mean", f"{self.mean} seconds cannot be waited.", "Use a finite mean >= 0.")
    if not 0.0 <= self.sigma <= 5.0:
      raise ConfigError("environment.sigma", f"{self.sigma} is out of range.", "Use a sigma between 0 and 5.")

  def make(self, tokenizer: Tokenizer) -> SimulatedLatencyEpisode:
    return SimulatedLatencyEpisode(self, self.inner.make(tokenizer))

  def delays(self, key: PromptKey) -> np.random.Generator:
    """Makes the source of the waits of an episode of a prompt, which `draw` takes."""
    return generator_of(self.seed, key) if self.alike else np.random.default_rng()

  def draw(self, delays: np.random.Generator) -> float:
    """Draws the next wait, in seconds."""
    return self.mean * math.exp(self.sigma * delays.standard_normal() - self.sigma**2 / 2)


class SimulatedLatencyEpisode(WrappedEpisode):
  """The inner episode, whose every step comes later."""

  def __init__(self, settings: SimulatedLatency, inner: Environment):
    super().__init__(inner)
    self._settings = settings

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._delays = self._settings.delays(prompt.key)
    return await self._inner.reset(prompt)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    wait, tick, now = self._settings.draw(self._delays), self._settings.tick, asyncio.get_running_loop().time()
    await asyncio.sleep(math.ceil((now + wait) / tick) * tick - now if tick else wait)
    return await self._inner.step(action_ids)
