"""A reasoning-gym task on a laptop CPU: the model of the quickstart learns to spell words backward."""

from __future__ import annotations

import dataclasses

from configs import calculator
from sao_jax.config import RunConfig
from sao_jax.environments.reasoning_gym import ReasoningGym


def get_config() -> RunConfig:
  """Any reasoning-gym task goes here by name; a success is the full reward of the task's own scorer."""
  base = calculator.get_config()
  return dataclasses.replace(
    base,
    name="reasoning_gym",
    environment=ReasoningGym("spell_backward", {"min_word_len": 3, "max_word_len": 4}),
    sampler=dataclasses.replace(base.sampler, prefill_buckets=(64,)),
    rollout=dataclasses.replace(base.rollout, max_turns=1, max_tokens=12, max_tokens_per_turn=12, row_counts=(40, 64)),
  )
