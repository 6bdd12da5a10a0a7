"""Online learning on a laptop CPU: the rewarded style of the answers changes twice, and a tiny policy follows."""

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
from sao_jax.environments.online_styles import OnlineStyles

BATCH, PHASE_UPDATES = 64, 80


def get_config() -> RunConfig:
  """Three phases of 80 updates. Imitation shows all styles; its demonstrations are wrong in three of ten."""
  environment = OnlineStyles(phase_prompts=BATCH * PHASE_UPDATES)
  return RunConfig(
    name="online_learning",
    environment=environment,
    model=ModelConfig(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128),
    algorithm=AlgorithmConfig(critic_reads_logprobs=True),
    policy_optimizer=OptimizerConfig(learning_rate=1e-3),
    critic_optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0, warmup_steps=10),
    sampler=SamplerConfig(
      num_slots=64,
      context_length=64,
      decode_steps=4,
      decode_batch=16,
      prefill_buckets=(48,),
      prefill_batch=8,
      window_buckets=(64,),
    ),
    rollout=RolloutConfig(
      batch_size=BATCH,
      admission_staleness=1,
      max_staleness=8,
      max_turns=1,
      max_tokens=24,
      max_tokens_per_turn=24,
      row_lengths=(64,),
      row_counts=(32, 64),
    ),
    sft=SFTConfig(steps=800, batch_size=64, optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.0)),
    value_pretraining=ValuePretrainingConfig(
      demonstration_steps=20,
      min_steps=40,
      max_steps=40,
      optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=10.0),
    ),
    evaluation=EvaluationConfig(every=80, prompts=120),
    training=TrainingConfig(steps=len(environment.wanted) * PHASE_UPDATES, checkpoint_every=80),
  )
