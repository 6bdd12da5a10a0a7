"""Repositories on a laptop CPU: a tiny model looks at a file, corrects its bug by `sed`, and is judged by hidden tests.

The model is the quickstart's, with longer episodes. It imitates an expert that makes mistakes on purpose, and SAO goes
on from there; every episode has real sandboxes, real git and real tests.
"""

from __future__ import annotations

import dataclasses

from configs import calculator
from sao_jax.config import RunConfig, ValuePretrainingConfig
from sao_jax.environments.small_repositories import SmallRepositories


def get_config() -> RunConfig:
  """The quickstart's numbers; rollouts cost more, so the critic begins with demonstrations, and batches are smaller."""
  base = calculator.get_config()
  return dataclasses.replace(
    base,
    name="repository",
    environment=SmallRepositories(),
    sampler=dataclasses.replace(
      base.sampler, num_slots=32, context_length=256, prefill_buckets=(48,), window_buckets=(128, 256)
    ),
    rollout=dataclasses.replace(
      base.rollout,
      batch_size=32,
      max_turns=6,
      max_tokens=160,
      max_tokens_per_turn=48,
      row_lengths=(256,),
      row_counts=(24, 32, 64),
    ),
    sft=dataclasses.replace(base.sft, steps=300),
    value_pretraining=ValuePretrainingConfig(
      demonstration_steps=50, min_steps=50, max_steps=50, optimizer=base.value_pretraining.optimizer
    ),
    evaluation=dataclasses.replace(base.evaluation, every=25, prompts=200),
    training=dataclasses.replace(base.training, steps=50, checkpoint_every=25),
  )
