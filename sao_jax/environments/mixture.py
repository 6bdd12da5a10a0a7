"""Several environments in one run: each with its share of the prompts, its reward scale, and a held-out set of its own.

A prompt's key names its environment, which plays the episode. Only training scales rewards: prompts of the training
split carry the scale, those of the held-out split have 1, so that evaluation shows what the environments say.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from sao_jax.data.mixed_prompts import MixedPrompts
from sao_jax.data.prompts import check_split
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Demonstration, Environment, EnvironmentSpec, StepResult
from sao_jax.episode import BadPrompt, Prompt, Status
from sao_jax.errors import ConfigError
from sao_jax.rewards.scalar import check_reward
from sao_jax.settings import Reopened

PROBE = "".join(map(chr, range(32, 127))) + " The quick brown fox 0123 é 中 🙂\n\n\t x"  # tells tokenizers apart
MAX_CYCLE = 10_000  # turns


@dataclasses.dataclass(frozen=True)
class Part:
  """One environment of a mixture."""

  environment: EnvironmentSpec  # wrappers such as InThreads go around this one, or around the mixture
  weight: int = 1  # share of the rollouts, as in 3 to 1; 0: only its held-out split is used
  reward_scale: float = 1.0  # of the rewards that are trained on; evaluation shows them as they are


@dataclasses.dataclass(frozen=True)
class Mixture(Reopened):
  """Settings: the environments, which need the same tokenizer and names of their own."""

  parts: tuple[Part, ...]
  name: str = "mixture"

  def __post_init__(self):
    names = [part.environment.name for part in self.parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
      remedy = "Give each a name of its own: prompts and metrics are told apart by it."
      raise ConfigError("environment.parts", f"There are several environments with the name {twice}.", remedy)
    for index, part in enumerate(self.parts):
      if not isinstance(part.weight, int) or part.weight < 0:
        remedy = "Use whole numbers, as in 3 to 1."
        raise ConfigError(f"environment.parts.{index}.weight", f"{part.weight!r} is no weight.", remedy)
      if not 0.0 < part.reward_scale < math.inf:
        remedy = "Use a number above 0."
        raise ConfigError(f"environment.parts.{index}.reward_scale", f"{part.reward_scale!r} is no scale.", remedy)

    # The order repeats after the sum of the weights, of which a table is kept.
    total = sum(part.weight for part in self.parts)
    if not 0 < total <= MAX_CYCLE:
      remedy = f"Use weights that add up to at least 1, and at most {MAX_CYCLE}."
      raise ConfigError("environment.parts", f"The weights add up to {total}.", remedy)

  @functools.cached_property
  def _tokenizer(self) -> Tokenizer:
    first, *others = ((part.environment.name, part.environment.tokenizer()) for part in self.parts)
    for name, tokenizer in others:
      if not _equal(first[1], tokenizer):
        remedy = "One model has one tokenizer: name the same tokenizer_folder in both."
        raise ConfigError("environment.parts", f"{first[0]!r} and {name!r} have different tokenizers.", remedy)
    return first[1]

  def tokenizer(self) -> Tokenizer:
    return self._tokenizer

  def make(self, tokenizer: Tokenizer) -> Environment:
    return MixtureEpisode(self, tokenizer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> MixedPrompts:
    train = check_split(split) == "train"
    parts = [part for part in self.parts if part.weight or not train]
    sources = [
      _Prompts(part.environment.prompts(tokenizer, split, seed), part.reward_scale if train else 1.0) for part in parts
    ]
    if train:
      for part, source in zip(parts, sources):
        if not len(source):
          remedy = "Give it some, or a weight of 0."
          raise ConfigError("environment.parts", f"{part.environment.name!r} has no training prompts.", remedy)
    return MixedPrompts(sources, [part.weight if train else 1 for part in parts])

  def part(self, name: str) -> Part:
    """Returns the part whose environment has this name; KeyError without one."""
    return {part.environment.name: part for part in self.parts}[name]

  @property
  def demonstration(self) -> Callable[[Prompt, Tokenizer, np.random.Generator], Demonstration]:
    """The experts of the environments; one that is trained without an expert makes this an AttributeError."""
    experts = {part.environment.name: part.environment.demonstration for part in self.parts if part.weight}

    def demonstrate(prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
      inner, scale = _inner(prompt)
      shown = experts[prompt.key.environment](inner, tokenizer, rng)
      turns = None if shown.turn_rewards is None else np.asarray(shown.turn_rewards) * scale
      return dataclasses.replace(shown, reward=shown.reward * scale, turn_rewards=turns)

    return demonstrate


class MixtureEpisode(Environment):
  """An episode of the environment that its prompt's key names; its rewards times the prompt's scale."""

  def __init__(self, settings: Mixture, tokenizer: Tokenizer):
    self.name = settings.name
    self._settings, self._tokenizer = settings, tokenizer
    self._inner: Environment | None = None

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Those of the environment, which is known once the episode has begun."""
    return self._inner.stop_ids

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    inner, self._scale = _inner(prompt)
    self.name = prompt.key.environment
    self._inner = self._settings.part(self.name).environment.make(self._tokenizer)
    return await self._inner.reset(inner)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    result = await self._inner.step(action_ids)
    if self._scale == 1.0 or not isinstance(result, StepResult) or result.reward is None:
      return result
    return dataclasses.replace(result, reward=check_reward(result.reward, self.name) * self._scale)

  async def on_truncated(self, status: Status) -> float:
    return check_reward(await self._inner.on_truncated(status), self.name) * self._scale

  async def close(self) -> None:
    if self._inner is not None:
      await self._inner.close()


class _Prompts(Sequence[Prompt]):
  """The prompts of one environment, with the scale of its rewards beside their data."""

  def __init__(self, source: Sequence[Prompt], scale: float):
    self._source, self._scale = source, scale

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Prompt:
    prompt = self._source[index]
    return dataclasses.replace(prompt, data={"data": prompt.data, "reward_scale": self._scale})


def _inner(prompt: Prompt) -> tuple[Prompt, float]:
  """Returns the environment's own prompt, and the scale of its rewards.

  Raises:
    BadPrompt: the prompt is none of a mixture, such as one of a run that went on with another environment.
  """
  if prompt.data.keys() != {"data", "reward_scale"}:
    problem = f"prompt {tuple(prompt.key)} was not made by a mixture"
    raise BadPrompt("environment", problem, "Go on with the environment that the run has begun with")
  return dataclasses.replace(prompt, data=prompt.data["data"]), prompt.data["reward_scale"]


def _equal(first: Tokenizer, second: Tokenizer) -> bool:
  """Tells whether two tokenizers say the same of a text and of many ids."""
  if first is second:
    return True
  size = first.vocab_size
  if size != second.vocab_size or [*first.encode(PROBE)] != [*second.encode(PROBE)]:
    return False
  ids = [*range(0, size, max(size // 256, 1)), *range(max(size - 64, 0), size)]
  return all(first.decode([number]) == second.decode([number]) for number in ids)
