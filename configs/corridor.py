"""Corridors of three doors on one core: the shortest of the tasks on which methods are compared."""

from __future__ import annotations

import math

from sao_jax.config import (
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
from sao_jax.environments.corridor import Corridor
from sao_jax.environments.wrappers import SimulatedLatency

ROW = 128  # tokens of a packed row, or one context if that is longer


def get_config() -> RunConfig:
  """Three doors; `configs/corridor_10.py` and `configs/corridor_30.py` have more."""
  return corridor_config(Corridor(horizon=3))


def corridor_config(corridor: Corridor, *, batch: int = 32) -> RunConfig:
  """Makes a run of 300 updates on a corridor, from which contexts, turns and rows follow.

  The lag is about `rollout.admission_staleness`; waits of a long tail make that of a trajectory differ from it. Each
  rollout waits for itself, so that a group waits for its slowest.
  """
  # A turn has two tokens, a sign behind clutter, and pauses. Most walks are no longer than the corridor.
  turn = 3.2 + corridor.clutter
  context = _multiple(8 + corridor.max_calls * (turn + 0.8), of=16)
  row = context * max(1, ROW // context)
  usual = math.ceil(1.3 * batch * (5 + corridor.clutter + corridor.horizon * turn) / row)
  most = max(batch, 64) * context // row
  return RunConfig(
    name="corridor",
    environment=SimulatedLatency(corridor, mean=0.002, sigma=1.5, alike=False),
    model=ModelConfig(num_layers=1, d_model=32, num_heads=2, num_kv_heads=2, head_dim=16, d_ff=64),
    policy_optimizer=OptimizerConfig(learning_rate=3e-4),
    critic_optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0, warmup_steps=10),
    sampler=SamplerConfig(
      num_slots=128,
      context_length=context,
      decode_steps=2,
      decode_batch=32,
      prefill_buckets=(_multiple(5 + corridor.clutter, of=8),),
      prefill_batch=8,
      window_buckets=(context,),
    ),
    rollout=RolloutConfig(
      batch_size=batch,
      admission_staleness=1,
      max_staleness=8,
      max_turns=corridor.max_calls,
      max_tokens=context,
      max_tokens_per_turn=8,
      row_lengths=(row,),
      row_counts=(usual, most) if usual < most else (most,),
    ),
    sft=SFTConfig(steps=400, batch_size=64, optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0)),
    value_pretraining=ValuePretrainingConfig(
      demonstration_steps=50,
      min_steps=100,
      max_steps=100,
      optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0),
    ),
    evaluation=EvaluationConfig(every=100, prompts=300),
    training=TrainingConfig(steps=300, checkpoint_every=300, keep_checkpoints=1, trackers=()),
  )


def _multiple(tokens: float, of: int) -> int:
  """Rounds up to a multiple."""
  return of * math.ceil(tokens / of)
