"""The sizes of the measurements: the full ones, and tiny ones that only show that everything runs."""

from __future__ import annotations

import dataclasses

from sao_jax.config import (
  AlgorithmConfig,
  ModelConfig,
  OptimizerConfig,
  RolloutConfig,
  RunConfig,
  SamplerConfig,
  SFTConfig,
  TrainingConfig,
)
from sao_jax.environments.calculator import Calculator


@dataclasses.dataclass(frozen=True)
class Scale:
  """Sizes of all suites.

  Attributes:
    dense: the dense transformer that is compared with other frameworks.
    moe: the same with experts.
    experts: numbers of experts to compare in `moe`.
    slots: numbers of slots to compare, all busy with `prompt_length` + `answer_length` tokens.
    num_requests: with uneven answers, on the largest number of slots.
    prompt_lengths: shortest and longest prompt of those.
    answer_minimum, answer_maximum: of their budgets min(maximum, minimum · (1 + Pareto(1.5))).
    rows, tokens: shape [B, T] of a train step's batch.
    gemm_size: of the square matrix product that is the limit.
    rounds: timed repetitions of everything.
    run: whose compilations are counted.
  """

  dense: ModelConfig
  moe: ModelConfig
  experts: tuple[int, ...]
  slots: tuple[int, ...]
  prompt_length: int
  answer_length: int
  num_requests: int
  prompt_lengths: tuple[int, int]
  answer_minimum: int
  answer_maximum: int
  rows: int
  tokens: int
  gemm_size: int
  rounds: int
  run: RunConfig


def calculator_run(imitation_steps: int, train_steps: int) -> RunConfig:
  """Small calculators whose answers are of uneven lengths, because they have only begun to imitate.

  A batch fills now less and now more than 16 rows, so that the buckets of the packed rows are put to the test too.
  """
  return RunConfig(
    name="benchmark",
    environment=Calculator(),
    model=ModelConfig(num_experts=4),
    algorithm=AlgorithmConfig(critic_warmup_steps=1),
    policy_optimizer=OptimizerConfig(learning_rate=3e-4),
    critic_optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0),
    sampler=SamplerConfig(
      num_slots=32, context_length=96, decode_steps=4, prefill_buckets=(8, 16, 96), prefill_batch=8
    ),
    rollout=RolloutConfig(
      batch_size=40,
      admission_staleness=1,
      max_turns=6,
      max_tokens=64,
      max_tokens_per_turn=16,
      row_lengths=(96,),
      row_counts=(16, 24, 40),
    ),
    sft=SFTConfig(
      steps=imitation_steps,
      batch_size=32,
      optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0, warmup_steps=20),
    ),
    training=TrainingConfig(steps=train_steps - 1, checkpoint_every=2, audit=False),
  )


_DENSE = ModelConfig(vocab_size=512, num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=384)
FULL = Scale(
  dense=_DENSE,
  moe=dataclasses.replace(_DENSE, num_experts=8, num_experts_per_token=2, d_ff_expert=128),
  experts=(4, 8, 16, 32),
  slots=(1, 8, 32, 64),
  prompt_length=32,
  answer_length=96,
  num_requests=256,
  prompt_lengths=(8, 64),
  answer_minimum=16,
  answer_maximum=128,
  rows=64,
  tokens=128,
  gemm_size=2048,
  rounds=5,
  run=calculator_run(imitation_steps=150, train_steps=20),
)

_TINY = ModelConfig(vocab_size=32, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32)
QUICK = Scale(
  dense=_TINY,
  moe=dataclasses.replace(_TINY, num_experts=2, num_experts_per_token=2, d_ff_expert=16),
  experts=(2, 4),
  slots=(1, 4),
  prompt_length=5,
  answer_length=8,
  num_requests=8,
  prompt_lengths=(4, 5),
  answer_minimum=2,
  answer_maximum=8,
  rows=4,
  tokens=16,
  gemm_size=128,
  rounds=2,
  run=calculator_run(imitation_steps=2, train_steps=6),
)
