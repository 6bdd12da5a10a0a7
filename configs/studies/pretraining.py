"""Value pretraining: a critic that has seen rollouts of the initial policy, or a copy of the policy with a new head."""

from __future__ import annotations

from configs.studies.shared import CONFIG, FIELDS, method
from sao_jax.study import Study


def get_study() -> Study:
  """Advantages of a cold critic are whitened, unless that is turned off."""
  return Study(
    name="pretraining",
    question="What is lost without value pretraining?",
    config=CONFIG,
    variants={
      "sao": method("sao"),
      "sao_cold": method("sao"),
      "sao_cold_raw": method("sao_raw"),
      "sao_whitened": method("sao_whitened"),
    },
    cold=("sao_cold", "sao_cold_raw"),
    fields=FIELDS,
    measures=("heldout_success", "reward_mean:mean", "reward_mean:worst_dip", "explained_variance:begin"),
  )
