"""Online learning: what is rewarded changes twice during a run."""

from __future__ import annotations

from configs.online_learning import BATCH, PHASE_UPDATES
from configs.studies.shared import Fields
from sao_jax.configuration.methods import METHODS
from sao_jax.study import Study

GROUP_SIZE = 8


def get_study() -> Study:
  """A phase lasts as many updates for all methods: eight rollouts of a prompt take an eighth of the prompts."""
  groups: Fields = {
    "rollout.group_size": GROUP_SIZE,
    "environment.phase_prompts": BATCH * PHASE_UPDATES // GROUP_SIZE,
  }
  return Study(
    name="online",
    question="How many updates after each switch of the rewarded style does success take to recover?",
    config="configs/online_learning.py",
    variants={
      "sao": METHODS["sao"],
      "running_mean_global": METHODS["running_mean_global"],
      "grpo": {**METHODS["grpo"], **groups},
      "grpo_dis": {**METHODS["grpo_dis"], **groups},
    },
    fields={
      "training.trackers": (),
      "training.keep_checkpoints": 1,
      "training.checkpoint_every": 10_000,
    },
    pictures=("info_success/online_styles",),
    measures=("info_success/online_styles:recovery", "info_success/online_styles:mean", "heldout_success"),
  )
