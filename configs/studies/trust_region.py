"""The trust region: what leaves it, and what that costs, at a lag of more than ten updates."""

from __future__ import annotations

from configs.studies import stability_lag16
from configs.studies.shared import CONFIG, FIELDS, Fields
from sao_jax.study import Study

BANDS = {
  "sao_lag16": (0.3, 5.0),  # reasoning
  "coding": (0.8, 3.0),
  "narrow": (0.1, 0.1),
  "clip_higher": (0.2, 0.28),
  "no_upper_end": (0.3, float("inf")),
  "open": (1.0, float("inf")),
}
TAUS = {"tau_8": 8, "tau_12": 12}


def get_study() -> Study:
  """Bands of the ratio are given by both ends; the oldest token of a trajectory may be as old as tau."""
  base = stability_lag16.get_study().variants["sao_lag16"]
  bands: dict[str, Fields] = {
    name: {**base, "algorithm.epsilon_low": low, "algorithm.epsilon_high": high} for name, (low, high) in BANDS.items()
  }
  return Study(
    name="trust_region",
    question="How much is rejected by each band and each bound on staleness, and does the reward suffer?",
    config=CONFIG,
    variants=bands | {"sao_lag16": base} | {name: {**base, "rollout.max_staleness": tau} for name, tau in TAUS.items()},
    fields=FIELDS,
    pictures=("reward_mean", "rejected_low+rejected_high"),
    measures=(
      *("rejected_low+rejected_high:mean", "heldout_success", "reward_mean:mean", "reward_mean:worst_dip"),
      *("policy_grad_norm:spikes", "lag_mean:mean"),
    ),
  )
