"""Qwen3-30B-A3B, policy and critic, on a slice of 64 v5p chips: the paper's batch of 128 trajectories x 131,072 tokens.

    python -m launch.train --config=configs/qwen3_30b_a3b.py --workdir=gs://BUCKET/runs/qwen3 \\
      --config.model.checkpoint=DIR --config.environment.tokenizer_folder=model.checkpoint

DIR is the model's Hugging Face folder. Without it the model starts from random weights and reads bytes, which shows
that everything runs and fits. What each chip holds and what bounds a step: `python -m launch.compile_pod
--config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4`.

The mesh: a row of 131,072 tokens lies on four chips (context=4), one plane of the torus splits rows and weights
(fsdp=16). Eight micro-batches of 16 rows leave 32,768 tokens to a chip at a time; gathering the weights eight times
costs a few seconds of a step of minutes. On v6e:16x16:
--config.mesh.context=16, and a sampler of 16 chips: expert=16 of sampler.mesh, four hosts together.

Every host samples, too: its four chips hold one copy of the policy, split by experts, and eight contexts.
"""

from __future__ import annotations

import dataclasses

from sao_jax.config import (
  AlgorithmConfig,
  EvaluationConfig,
  MeshConfig,
  RolloutConfig,
  RunConfig,
  SamplerConfig,
  SFTConfig,
  TrainingConfig,
  YarnConfig,
)
from sao_jax.environments.reasoning_gym import ReasoningGym
from sao_jax.huggingface.published import PUBLISHED

CONTEXT = 131_072


def get_config() -> RunConfig:
  """Learning rates, clips, K = 2, the critic's frozen attention and AdamW are the defaults, which are the paper's."""
  model = dataclasses.replace(
    PUBLISHED["Qwen3-30B-A3B"].model,
    yarn=YarnConfig(factor=4.0, original_positions=32_768),  # as the model's card says for 131,072 positions
    max_positions=CONTEXT,
    remat="attention",
  )
  return RunConfig(
    name="qwen3_30b_a3b",
    environment=ReasoningGym("zebra_puzzles"),
    model=model,
    algorithm=AlgorithmConfig(micro_batches=8, logprob_chunk=1024),
    mesh=MeshConfig(data=1, fsdp=16, context=4),
    sampler=SamplerConfig(
      num_slots=8,
      mesh=MeshConfig(fsdp=1, expert=4),
      context_length=CONTEXT,
      decode_steps=16,
      prefill_chunk=256,  # of each part of the mesh: 1024 in all
      window_buckets=(CONTEXT,),
      cache_dtype="bfloat16",
    ),
    rollout=RolloutConfig(
      batch_size=128,
      max_turns=1,
      max_tokens=CONTEXT,
      max_tokens_per_turn=CONTEXT,
      row_lengths=(CONTEXT,),
      row_counts=(128,),
    ),
    sft=SFTConfig(steps=0),
    evaluation=EvaluationConfig(every=20, prompts=256, sampler="shared"),
    training=TrainingConfig(steps=500, checkpoint_every=20, audit_tolerance=0.05),
  )
