"""A model of your own: the Hugging Face folder in model.checkpoint gives shape, tokenizer and chat template."""

from __future__ import annotations

from sao_jax.config import (
  MODEL_CHECKPOINT,
  EvaluationConfig,
  OptimizerConfig,
  RolloutConfig,
  RunConfig,
  SamplerConfig,
  SFTConfig,
  TrainingConfig,
)
from sao_jax.environments.reasoning_gym import ReasoningGym


def get_config() -> RunConfig:
  """Any reasoning-gym task goes here by name; learning rates are the paper's, sizes those of short answers."""
  return RunConfig(
    name="own_model",
    environment=ReasoningGym(
      "chain_sum",
      {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
      tokenizer_folder=MODEL_CHECKPOINT,
      template_options={"enable_thinking": False},  # answers at once; a template without it ignores it
    ),
    sampler=SamplerConfig(
      num_slots=16,
      context_length=128,
      decode_batch=8,
      prefill_buckets=(64,),
      prefill_batch=1,
      window_buckets=(128,),
    ),
    rollout=RolloutConfig(
      batch_size=16,
      admission_staleness=2,
      max_turns=1,
      max_tokens=32,
      max_tokens_per_turn=32,
      row_lengths=(128,),
      row_counts=(16,),
    ),
    sft=SFTConfig(steps=50, batch_size=16, optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10)),
    evaluation=EvaluationConfig(prompts=100),
    training=TrainingConfig(steps=100, checkpoint_every=50),
  )
