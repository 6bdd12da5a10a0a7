"""Environments and a sampler for the loop's benchmark: they wait, and compute nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import Environment, StepResult
from sao_jax.episode import Prompt, PromptKey
from sao_jax.rollout.event_model import Episode
from sao_jax.sampler.requests import Completion, GenerateRequest

NUM_PROMPTS = 100_000


@dataclasses.dataclass(frozen=True)
class Sleeping:
  """Settings of episodes of one turn that last exp(N(mu, sigma^2)) seconds, `mean` on average; some raise, some hang.

  The fate of an episode depends on `seed` and its prompt's key alone.
  """

  mean: float  # seconds
  sigma: float  # standard deviation of the logarithm of the seconds
  seed: int = 0
  raising: float = 0.0  # fraction of the episodes
  hanging: float = 0.0  # fraction of the episodes
  burning: float = 0.0  # seconds of CPU that every reward function takes, in a thread

  name = "sleeping"

  def tokenizer(self) -> ByteTokenizer:
    return ByteTokenizer()

  def make(self, tokenizer: ByteTokenizer) -> SleepingEpisode:
    return SleepingEpisode(self, tokenizer.end_id)

  def prompts(self, tokenizer: ByteTokenizer, split: str, seed: int) -> Sequence[Prompt]:
    return SleepingPrompts()

  def episode(self, key: PromptKey) -> Episode:
    """Draws the duration of the episode on this prompt, infinite when it hangs, and whether it fails."""
    rng = np.random.default_rng([self.seed, key.epoch, key.id])
    seconds = self.mean * math.exp(self.sigma * rng.standard_normal() - self.sigma**2 / 2)
    fault = rng.random()
    if fault < self.raising:
      return Episode(0.0, failed=True)
    if fault < self.raising + self.hanging:
      return Episode(math.inf, failed=True)
    return Episode(seconds)


class SleepingPrompts(Sequence[Prompt]):
  """Prompts that hold nothing but their keys."""

  def __len__(self) -> int:
    return NUM_PROMPTS

  def __getitem__(self, index: int) -> Prompt:
    return Prompt(PromptKey(Sleeping.name, index, 0), {})


class SleepingEpisode(Environment):
  """An episode that answers its only action after a wait."""

  name = Sleeping.name

  def __init__(self, settings: Sleeping, stop_id: int):
    self._settings, self.stop_ids = settings, (stop_id,)

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._episode = self._settings.episode(prompt.key)
    return np.zeros(1, dtype=np.int32)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    if math.isinf(self._episode.seconds):
      await asyncio.Event().wait()
    if self._episode.failed:
      raise RuntimeError("injected")
    await asyncio.sleep(self._episode.seconds)
    reward = await asyncio.to_thread(burn, self._settings.burning) if self._settings.burning else 1.0
    return StepResult([], True, reward)


def burn(seconds: float) -> float:
  """Computes in Python for so many seconds of CPU, as a reward function that mostly holds the interpreter's lock."""
  end = time.thread_time() + seconds
  while time.thread_time() < end:
    pass
  return 1.0


class InstantSampler:
  """A sampler that answers every request at once with a stop token, stamped with `version`."""

  def __init__(self) -> None:
    self.version, self.error = 0, None

  def new_session(self) -> int:
    return 0

  def release(self, session_id: int) -> None:
    del session_id

  async def generate(self, request: GenerateRequest) -> Completion:
    ids, versions = np.asarray(request.stop_ids[:1], dtype=np.int32), np.asarray([self.version], dtype=np.int32)
    return Completion(ids, np.full(1, -1.0, dtype=np.float32), versions, "stop")
