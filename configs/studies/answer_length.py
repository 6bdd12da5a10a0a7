"""Answer length over training: pauses have no use in a corridor, and do no harm."""

from __future__ import annotations

from configs.studies.shared import COMPARED, CONFIG, FIELDS, method
from sao_jax.study import Study


def get_study() -> Study:
  """The runs of `stability`, looked at for the length of their answers."""
  return Study(
    name="answer_length",
    question="Do answers become shorter with some methods than with others?",
    config=CONFIG,
    variants={name: method(name) for name in COMPARED},
    fields=FIELDS,
    pictures=("response_length_mean", "entropy"),
    measures=("response_length_mean", "turns_mean", "response_length_mean:change", "entropy"),
  )
