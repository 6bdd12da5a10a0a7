"""A run so small that all its phases take seconds: one layer, eight slots, a game that any policy half wins."""

from __future__ import annotations

import dataclasses

import numpy as np

from sao_jax.config import (
  AlgorithmConfig,
  EvaluationConfig,
  ModelConfig,
  OptimizerConfig,
  RolloutConfig,
  RunConfig,
  SamplerConfig,
  SFTConfig,
  TrainingConfig,
  ValuePretrainingConfig,
)
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import Demonstration, Environment, StepResult
from sao_jax.episode import Prompt, PromptKey

VOCABULARY, STOP_IDS = 32, tuple(range(24, 32))


class SmallTokenizer(ByteTokenizer):
  """Only ids below 32 occur."""

  vocab_size = VOCABULARY


class ParityEpisode(Environment):
  """Two turns; the reward is 1 when the sum of all sampled ids is even."""

  name, stop_ids = "parity", STOP_IDS

  async def reset(self, prompt):
    self.total, self.turns = 0, 0
    return np.array([1, 2 + prompt.data["number"]], np.int32)

  async def step(self, action_ids):
    self.total, self.turns = self.total + int(action_ids.sum()), self.turns + 1
    if self.turns == 2:
      return StepResult([], True, float(self.total % 2 == 0))
    return StepResult([3, 4], False)

  async def on_truncated(self, status):
    return float(self.total % 2 == 0)


@dataclasses.dataclass(frozen=True)
class Parity:
  """Its settings."""

  name: str = "parity"
  tokenizer = SmallTokenizer
  make = staticmethod(lambda tokenizer: ParityEpisode())

  def prompts(self, tokenizer, split, seed):
    return [Prompt(PromptKey(self.name, i, 0), {"number": i % 8 + 8 * (split == "heldout")}) for i in range(64)]

  def demonstration(self, prompt, tokenizer, rng):
    ids = np.array([1, 2 + prompt.data["number"], 5, 24, 3, 4, int(rng.integers(5, 20)), 25], np.int32)
    return Demonstration(ids, np.array([0, 0, 1, 1, 0, 0, 1, 1], bool), 1.0)


def get_config() -> RunConfig:
  """The toy run; tests replace what they are about."""
  return RunConfig(
    name="toy",
    environment=Parity(),
    model=ModelConfig(
      vocab_size=VOCABULARY,
      num_layers=1,
      d_model=16,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      num_experts=2,
      d_ff_expert=16,
    ),
    algorithm=AlgorithmConfig(critic_warmup_steps=1, logprob_chunk=128),
    policy_optimizer=OptimizerConfig(learning_rate=1e-3),
    critic_optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0),
    sampler=SamplerConfig(
      num_slots=8, context_length=32, decode_steps=4, prefill_buckets=(8,), prefill_batch=4, window_buckets=(32,)
    ),
    rollout=RolloutConfig(
      batch_size=4,
      admission_staleness=1,
      max_staleness=4,
      max_turns=2,
      max_tokens=16,
      max_tokens_per_turn=8,
      row_lengths=(32,),
      row_counts=(8,),
    ),
    sft=SFTConfig(steps=3, batch_size=4),
    value_pretraining=ValuePretrainingConfig(min_steps=2, max_steps=2, passes=1, heldout_fraction=0.0),
    evaluation=EvaluationConfig(every=0, prompts=6),
    training=TrainingConfig(steps=4, checkpoint_every=2),
  )


def replace(config: RunConfig, **sections) -> RunConfig:
  """`replace(config, rollout={"batch_size": 2})`: fields of sections replaced."""
  new = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
  return dataclasses.replace(config, **new)
