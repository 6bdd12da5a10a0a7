"""Held-out success and stability of the methods, at a lag of about three updates."""

from __future__ import annotations

from configs.studies.shared import COMPARED, CONFIG, FIELDS, method
from sao_jax.study import Study

MEASURES = (
  *("heldout_success", "reward_mean:mean", "reward_mean:worst_dip", "reward_mean:noise", "policy_grad_norm:spikes"),
  *("rejected_low+rejected_high:mean", "lag_mean:mean"),
  *("info_solved_easy/corridor", "info_solved_medium/corridor", "info_solved_hard/corridor"),
)


def get_study() -> Study:
  """All of the methods begin with the same policy and the same critic."""
  return Study(
    name="stability",
    question="Which method ends with the highest held-out success, and which falls on the way?",
    config=CONFIG,
    variants={name: method(name) for name in COMPARED},
    fields=FIELDS,
    measures=MEASURES,
  )
