"""The learning rates of all methods, by one sweep."""

from __future__ import annotations

from configs.studies.shared import COMPARED, CONFIG, FIELDS, method
from sao_jax.study import Study

RATES = {"3e-4": 3e-4, "1e-3": 1e-3, "3e-3": 3e-3}


def get_study() -> Study:
  """Short runs of two seeds; the mean over a run tells who learns fast, the worst dip who breaks."""
  return Study(
    name="learning_rates",
    question="At which learning rate of the policy does each method learn fastest without breaking?",
    config=CONFIG,
    variants={
      f"{name}_{rate}": method(name, policy_optimizer__learning_rate=value, training__steps=100)
      for name in COMPARED
      for rate, value in RATES.items()
    },
    seeds=(0, 1),
    fields=FIELDS,
    baseline="sao_1e-3",
    measures=("heldout_success", "reward_mean:mean", "reward_mean:worst_dip"),
  )
