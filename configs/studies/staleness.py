"""Staleness: what dropping old trajectories does to the data, and masking their old tokens instead."""

from __future__ import annotations

from configs.studies.shared import CONFIG, FIELDS, method
from sao_jax.study import Study


def get_study() -> Study:
  """Answers take very different times, so that some walks become much older than others."""
  tail = {"environment__sigma": 1.5}
  old = {"rollout__max_staleness": 4, **tail}
  return Study(
    name="staleness",
    question="Are long episodes missing from the data when old ones are dropped?",
    config=CONFIG,
    variants={
      "all": method("sao", **tail),
      "drop": method("sao", **old),
      "mask": method("sao", rollout__staleness="mask", **old),
    },
    fields=FIELDS,
    pictures=("reward_mean", "used_over_generated_latency"),
    measures=(
      *("used_over_generated_latency:mean", "response_length_mean:mean", "num_trained_tokens:mean"),
      *("heldout_success", "reward_mean:mean", "lag_mean:mean"),
    ),
  )
