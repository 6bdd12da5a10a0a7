"""Credit: from what to what GAE steps."""

from __future__ import annotations

from configs.studies.shared import CONFIG, FIELDS, method
from sao_jax.study import Study

STEPS = ("sao", "sao_step_average", "sao_step_last", "sao_through_observations", "sao_response_lambda")


def get_study() -> Study:
  """SAO steps from each sampled token to the next one, over observations."""
  return Study(
    name="credit",
    question="Does it matter whether advantages step by token, by turn, or through observations?",
    config=CONFIG,
    variants={name: method(name) for name in STEPS},
    fields=FIELDS,
    measures=("heldout_success", "reward_mean:mean", "reward_mean:worst_dip", "explained_variance:median"),
  )
