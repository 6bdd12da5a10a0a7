"""SAO, its ablations and the methods that the paper compares it with, on the quickstart's task."""

from __future__ import annotations

from sao_jax.configuration.methods import METHODS
from sao_jax.study import Study

COMPARED = (
  *("sao", "sao_dis_only", "sao_k1", "sao_k4", "sao_full_critic", "sao_step_average", "sao_step_last"),
  *("grpo_dis", "grpo", "vapo", "running_mean", "running_mean_global"),
)


def get_study() -> Study:
  """Equal trajectories per update for all: 64 prompts, or 8 prompts eight times."""
  return Study(
    name="methods",
    question="Which method ends with the highest held-out success, from the same policy and the same critic?",
    config="configs/calculator.py",
    variants={name: METHODS[name] for name in COMPARED},
  )
