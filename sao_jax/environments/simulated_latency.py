"""Log-normal waits around any environment: the long tail of real tools, for experiments with the asynchronous loop."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Demonstration, Environment, EnvironmentSpec, Prompt, StepResult
from sao_jax.episode_types import PromptKey, Status
from sao_jax.errors import ConfigError


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
