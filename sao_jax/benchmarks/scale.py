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
class LoopScale:
  """Sizes of the loop's benchmark.

  Attributes:
    mean_latency: mean duration of an episode in seconds, long against the host's work for it, which is below 1 ms.
    steps: train steps of every run.
    batch_size: trajectories per step.
    sigmas: standard deviations to compare, of the logarithm of an episode's duration.
    train_times: durations of a train step to compare, in mean latencies.
    placements: (slots, eta, tau) to compare; tau = -1 for no bound.
    fault_points: (sigma, train time, slots, eta, tau) to compare with and without faults.
    timeout: time-out of an episode at the fault points, in mean latencies.
    burn_seconds: seconds that a reward function computes while the event loop is watched.
  """

  mean_latency: float
  steps: int
  batch_size: int
  sigmas: tuple[float, ...]
  train_times: tuple[float, ...]
  placements: tuple[tuple[int, int, int], ...]
  fault_points: tuple[tuple[float, float, int, int, int], ...]
  timeout: float
  burn_seconds: float


@dataclasses.dataclass(frozen=True)
class Scale:
  """Sizes of all suites.

  Attributes:
    dense: the dense transformer that is compared with other frameworks.
    moe: the same transformer with experts.
    experts: numbers of experts to compare in `moe`.
    slots: numbers of slots to compare, all busy with `prompt_length` + `answer_length` tokens.
    num_requests: number of requests with uneven answers, for the largest number of slots.
    prompt_lengths: shortest and longest prompt of these requests.
    answer_minimum, answer_maximum: bounds of their budgets min(maximum, minimum · (1 + Pareto(1.5))).
    rows, tokens: shape [B, T] of a train step's batch.
    micro_batches: number of micro-batches of a train step.
    gemm_size: rows and columns of the matrices whose product is the limit.
    rounds: timed repetitions of everything.
    run: the run whose compilations are counted.
    loop: sizes of the loop's benchmark.
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
  micro_batches: int
  gemm_size: int
  rounds: int
  run: RunConfig
  loop: LoopScale


def calculator_run(imitation_steps: int, train_steps: int) -> RunConfig:
  """Configures a small calculator run whose answers have uneven lengths, since imitation has only begun.

  Batches fill fewer or more than 16 rows, so the buckets of the packed rows are tested too. Every step is saved: on
  several devices, the first save compiles the slices that each of them writes.
  """
  return RunConfig(
    name="benchmark",
    environment=Calculator(),
    # The networks, and how they learn.
    model=ModelConfig(num_experts=4),
    algorithm=AlgorithmConfig(critic_warmup_steps=1),
    policy_optimizer=OptimizerConfig(learning_rate=3e-4),
    critic_optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0),
    # Several prefill buckets, row counts and turns: every program that a run of this size may need.
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
    # Short phases.
    sft=SFTConfig(
      steps=imitation_steps,
      batch_size=32,
      optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0, warmup_steps=20),
    ),
    training=TrainingConfig(steps=train_steps - 1, checkpoint_every=1, audit=False),
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
  micro_batches=2,
  gemm_size=2048,
  rounds=5,
  run=calculator_run(imitation_steps=150, train_steps=20),
  loop=LoopScale(
    mean_latency=0.15,
    steps=36,
    batch_size=16,
    sigmas=(0.5, 1.0, 1.5),
    train_times=(0.25, 1.0, 2.0),
    placements=((16, 1, -1), (16, 2, -1), (16, 2, 8), (16, 2, 4), (32, 2, -1), (32, 4, 8)),
    fault_points=tuple((sigma, train_time, 16, 2, -1) for sigma in (0.5, 1.0) for train_time in (0.25, 1.0, 2.0)),
    timeout=4.0,
    burn_seconds=2.0,
  ),
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
  micro_batches=1,
  gemm_size=128,
  rounds=2,
  run=calculator_run(imitation_steps=2, train_steps=6),
  loop=LoopScale(
    mean_latency=0.02,
    steps=4,
    batch_size=4,
    sigmas=(1.0,),
    train_times=(1.0,),
    placements=((4, 1, -1), (8, 2, 4)),
    fault_points=((0.5, 1.0, 4, 2, -1),),
    timeout=4.0,
    burn_seconds=0.1,
  ),
)
