"""Stability over a thousand updates."""

from __future__ import annotations

import dataclasses

from configs.studies import stability
from configs.studies.shared import COMPARED, method
from sao_jax.study import Study


def get_study() -> Study:
  """Five times as long as the other runs, which costs about seven core-minutes for each of these."""
  steps = {"training__steps": 1000, "evaluation__every": 100, "training__checkpoint_every": 250}
  return dataclasses.replace(
    stability.get_study(), name="long_runs", variants={f"{name}_1000": method(name, **steps) for name in COMPARED}
  )
