"""The quickstart: a 100k-parameter mixture of experts learns a multi-turn tool task on a laptop CPU in minutes."""

from __future__ import annotations

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
from sao_jax.environments.calculator import Calculator


def get_config() -> RunConfig:
  """Learning rates are those of a tiny model trained from scratch; of the algorithm, all but one field is the default.

  The critic reads the sampler's log-probs, since one of two layers learns too little of the task in a few minutes.
  """
  return RunConfig(
    name="calculator",
    environment=Calculator(),
    model=ModelConfig(
      num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=4, d_ff_expert=64
    ),
    algorithm=AlgorithmConfig(critic_reads_logprobs=True),
    policy_optimizer=OptimizerConfig(learning_rate=3e-4),
    critic_optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0, warmup_steps=10),
    sampler=SamplerConfig(
      num_slots=64,
      context_length=96,
      decode_steps=4,
      decode_batch=16,
      prefill_buckets=(16,),
      prefill_batch=4,
      window_buckets=(96,),
    ),
    rollout=RolloutConfig(
      batch_size=64,
      admission_staleness=2,
      max_staleness=8,
      max_turns=6,
      max_tokens=64,
      max_tokens_per_turn=16,
      row_lengths=(96,),
      row_counts=(32, 64),
    ),
    sft=SFTConfig(
      steps=800, batch_size=64, optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0, warmup_steps=50)
    ),
    value_pretraining=ValuePretrainingConfig(
      demonstration_steps=50,
      min_steps=110,
      max_steps=110,
      optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0),
    ),
    evaluation=EvaluationConfig(every=50, prompts=500),
    training=TrainingConfig(steps=150, checkpoint_every=50),
  )
