"""Qwen3-4B, policy and critic, on a small slice: 16 chips of v6e or v5e, 128 trajectories x 32,768 tokens.

    python -m launch.train --config=configs/qwen3_4b.py --workdir=runs/qwen3_4b \\
      --config.model.checkpoint=DIR --config.environment.tokenizer_folder=model.checkpoint

DIR is the model's Hugging Face folder. Without it the model starts from random weights and reads bytes, which shows
that everything runs and fits. What each chip holds and what bounds a step: `python -m launch.compile_pod
--config=configs/qwen3_4b.py --topology=v6e:4x4` (or v5e:4x4).
"""

from __future__ import annotations

import dataclasses

from configs import qwen3_30b_a3b
from sao_jax.config import AlgorithmConfig, MeshConfig, RunConfig
from sao_jax.huggingface.published import PUBLISHED

CONTEXT = 32_768


def get_config() -> RunConfig:
  """The model, its mesh and its sampler, and shorter rows; everything else as for Qwen3-30B-A3B."""
  base = qwen3_30b_a3b.get_config()
  lengths = {"max_tokens": CONTEXT, "max_tokens_per_turn": CONTEXT, "row_lengths": (CONTEXT,)}
  return dataclasses.replace(
    base,
    name="qwen3_4b",
    model=dataclasses.replace(PUBLISHED["Qwen3-4B"].model, remat="attention"),
    algorithm=AlgorithmConfig(micro_batches=16, logprob_chunk=512),
    mesh=MeshConfig(data=1, fsdp=4, context=4),
    sampler=dataclasses.replace(
      base.sampler, mesh=MeshConfig(fsdp=1, tensor=4), context_length=CONTEXT, window_buckets=(CONTEXT,)
    ),
    rollout=dataclasses.replace(base.rollout, **lengths),
  )
