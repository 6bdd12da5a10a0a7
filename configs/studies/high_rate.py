"""Stability at three times the learning rate at which all methods learn fastest: who breaks?"""

from __future__ import annotations

import dataclasses

from configs.studies import learning_rates, stability
from configs.studies.shared import COMPARED
from sao_jax.study import Study


def get_study() -> Study:
  """The runs of the sweep at its highest rate, with more seeds."""
  sweep = learning_rates.get_study()
  return dataclasses.replace(
    sweep,
    name="high_rate",
    question="Which method holds out at a learning rate that is too high for all of them?",
    variants={f"{name}_3e-3": sweep.variants[f"{name}_3e-3"] for name in COMPARED},
    seeds=(0, 1, 2, 3, 4),
    baseline="sao_3e-3",
    measures=(*stability.MEASURES, "response_length_mean:change"),
  )
