"""Held-out success and stability of the methods, at a lag of more than ten updates."""

from __future__ import annotations

import dataclasses

from configs.studies import stability
from configs.studies.shared import COMPARED, method
from sao_jax.study import Study


def get_study() -> Study:
  """Twenty batches are under way beside the one in training, and answers take five times as long."""
  lag = {"rollout__admission_staleness": 20, "sampler__num_slots": 672, "environment__mean": 0.75}
  return dataclasses.replace(
    stability.get_study(), name="stability_lag16", variants={f"{name}_lag16": method(name, **lag) for name in COMPARED}
  )
