"""Held-out success and stability of the methods, at a lag of about one update."""

from __future__ import annotations

import dataclasses

from configs.studies import stability
from configs.studies.shared import COMPARED, method
from sao_jax.study import Study


def get_study() -> Study:
  """One batch is under way beside the one in training."""
  lag = {"rollout__admission_staleness": 1, "sampler__num_slots": 64}
  return dataclasses.replace(
    stability.get_study(), name="stability_lag1", variants={f"{name}_lag1": method(name, **lag) for name in COMPARED}
  )
