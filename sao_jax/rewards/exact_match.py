"""Verifiers that compare texts: the same text, a pattern, an integer. Nothing that was said is ever evaluated."""

from __future__ import annotations

import re
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_text import spoken_answer

MAX_DIGITS = 18
INTEGER = re.compile(rf"[+-]?[0-9]{{1,{MAX_DIGITS}}}")


def parse_integer(text: str | None) -> int | None:
  """Parses the integer that the whole text spells, blanks around it allowed; returns None for any other text.

  Digits are ASCII and at most 18, so time and result are bounded for every text.
  """
  match = INTEGER.fullmatch(text.strip()) if text is not None else None
  return int(match.group()) if match else None


def integer_match(answer: str | None, expected: int) -> float:
  """Returns 1.0 when the whole answer spells the expected integer, else 0.0; no answer and no integer earn 0.0."""
  value = parse_integer(answer)
  return float(value is not None and value == expected)


def regex_match(said: str, gold: str) -> float:
  """Returns 1.0 when the regular expression `gold` matches the whole answer, see `spoken_answer`, else 0.0.

  Patterns are the data's. One that backtracks for ever on some answer is ended by the time-out of the `GraderPool`,
  as a failure of the grader.
  """
  answer = spoken_answer(said)
  return float(answer is not None and re.fullmatch(gold, answer) is not None)


def check_pattern(gold: Any, field: str = "gold") -> None:
  """Checks a right answer for `regex_match`.

  Raises:
    ConfigError: naming `field`, when it is no regular expression, or matches the empty answer.
  """
  if not isinstance(gold, str):
    raise ConfigError(field, f"{gold!r:.80} is no regular expression.", "Give a text.")
  try:
    matches_nothing = re.fullmatch(gold, "") is not None
  except (re.error, RecursionError, OverflowError) as error:
    raise ConfigError(field, f"{gold!r:.80} is no regular expression: {error}.", "Correct the pattern.") from error
  if matches_nothing:
    raise ConfigError(field, f"{gold!r:.80} matches the empty answer.", "Give a pattern that needs an answer.")
