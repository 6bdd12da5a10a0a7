"""A task of reasoning-gym, one answer for each prompt."""

from __future__ import annotations

from configs.studies.shared import COMPARED
from sao_jax.configuration.methods import METHODS
from sao_jax.study import Study


def get_study() -> Study:
  """64 trajectories for each update; group methods have 8 prompts eight times."""
  return Study(
    name="reasoning_gym",
    question="Does any method differ where one answer is the whole episode?",
    config="configs/reasoning_gym.py",
    variants={name: METHODS[name] for name in COMPARED},
    fields={
      "training.trackers": (),
      "training.keep_checkpoints": 1,
      "training.checkpoint_every": 10_000,
      "rollout.admission_staleness": 4,
      "rollout.max_staleness": -1,
    },
    measures=("heldout_success", "reward_mean:mean", "reward_mean:worst_dip", "explained_variance:median"),
  )
