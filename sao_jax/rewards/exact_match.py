"""Verifiers that compare an answer with the right one by parsing, never by evaluating the answer's text."""

from __future__ import annotations

import re

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
