"""Scorers by name: functions `(said, gold) -> reward` that compare what was said with the right answer of a data set.

A scorer that is not in the table is named by its place, "module:function". One raises for a right answer that it cannot
compare with; what a policy said may be any text, and is never a reason to raise.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.rewards.exact_match import check_pattern, integer_match, parse_integer, regex_match
from sao_jax.rewards.json_match import check_json, json_match
from sao_jax.rewards.math_answer import boxed_math_match, check_gold, math_match
from sao_jax.rewards.named_function import named_function

Scorer = Callable[[str, Any], float]


def text_match(said: str, gold: Any) -> float:
  """Returns 1.0 when the text is the right one, or one of a list of right ones; blanks around it do not count.

  >>> text_match(" Paris\\n", "Paris"), text_match("1.50", 1.5), text_match("grey", ["gray", "grey"])
  (1.0, 0.0, 1.0)
  """
  return float(said.strip() in [_text(each).strip() for each in (gold if isinstance(gold, list) else [gold])])


def integer_answer(said: str, gold: Any) -> float:
  """Returns 1.0 when the whole text spells the right integer, which may itself be a text that spells it."""
  expected = gold if isinstance(gold, int) and not isinstance(gold, bool) else parse_integer(_text(gold))
  if expected is None:
    raise ValueError(f"the right answer {gold!r:.80} is no integer")
  return integer_match(said, expected)


def check_text(gold: Any, field: str = "gold") -> None:
  """Checks a right answer for `text_match`.

  Raises:
    ConfigError: naming `field`, when it is neither text nor a number, nor a list of such, or when a blank one would pay
      for saying nothing.
  """
  golds = gold if isinstance(gold, list) else [gold]
  try:
    blank = not golds or not all(_text(each).strip() for each in golds)
  except ValueError as error:
    raise ConfigError(field, f"{error}.", "Give a text, a number, or a list of them.") from error
  if blank:
    raise ConfigError(field, f"{gold!r:.80} has a blank answer, or none.", "Give the text that is right.")


def check_integer(gold: Any, field: str = "gold") -> None:
  """Checks a right answer for `integer_answer`; raises a ConfigError naming `field` where it spells no integer."""
  try:
    integer_answer("", gold)
  except ValueError as error:
    raise ConfigError(field, f"{error}.", "Correct it in the data, or use another scorer.") from error


def _text(gold: Any) -> str:
  if isinstance(gold, bool) or not isinstance(gold, str | int | float):
    raise ValueError(f"the right answer {gold!r:.80} is neither text nor a number")
  return str(gold)


SCORERS: dict[str, Scorer] = {
  "text": text_match,
  "integer": integer_answer,
  "math": math_match,
  "boxed_math": boxed_math_match,
  "regex": regex_match,
  "json": json_match,
}
# Checks (gold, field) of right answers, which raise a ConfigError, for those who load the data.
GOLD_CHECKS: dict[str, Callable[[Any, str], None]] = {
  "text": check_text,
  "integer": check_integer,
  "math": check_gold,
  "boxed_math": check_gold,
  "regex": check_pattern,
  "json": check_json,
}
# An answer and its gold, with which a worker begins, so that no answer's time-out is for importing packages.
FIRST: dict[str, tuple[str, Any]] = {"math": ("1", "1"), "boxed_math": ("\\boxed{1}", "1")}


def find_scorer(name: str, field: str = "scorer") -> Scorer:
  """Returns the scorer of a name.

  Args:
    name: one of the table, or "module:function".
    field: named in the error.

  Raises:
    ConfigError: there is none.
  """
  if name in SCORERS:
    return SCORERS[name]
  remedy = f"Use one of {', '.join(map(repr, SCORERS))}, or 'module:function'."
  return named_function(name, field, kind="scorer", remedy=remedy)


def right_answer(name: str, gold: Any, field: str = "scorer") -> str:
  """Writes a right answer as the scorer of this name wants it said.

  Raises:
    ConfigError: its right answers are patterns, which are no answers.
  """
  if name == "regex":
    raise ConfigError(field, "A pattern is no answer to demonstrate.", "Choose another scorer for SFT.")
  if name == "json":
    return json.dumps(gold, ensure_ascii=False)
  text = str(gold[0] if isinstance(gold, list) and gold else gold)
  return f"\\boxed{{{text}}}" if name == "boxed_math" else text


class NamedScorer:
  """The scorer of a name, for worker processes: `(said, gold) -> reward`, and with None for `said` a check of the gold.

  As it arrives in a process it imports what it will need: sympy alone takes seconds on a busy machine.
  """

  def __init__(self, name: str):
    self._name = name

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    if self._name in FIRST:
      with contextlib.suppress(ImportError):  # a missing package is the failure of whoever needs it
        self(*FIRST[self._name])

  def __call__(self, said: str | None, gold: Any) -> float:
    return score_or_check(find_scorer(self._name), GOLD_CHECKS.get(self._name), said, gold)


def score_or_check(scorer: Scorer, check: Callable[[Any, str], None] | None, said: str | None, gold: Any) -> float:
  """Scores what was said; with None for it, returns 1.0 if `check` takes the right answer, and else 0.0."""
  if said is not None:
    return score_answer(scorer, said, gold)
  try:
    if check is not None:
      check(gold, "gold")
  except ConfigError:
    return 0.0
  return 1.0


def score_answer(scorer: Scorer, said: str, gold: Any) -> float:
  """Scores what was said. A text on which the scorer fails earns 0 if it can score the right answer itself.

  Raises:
    Exception: of any kind, from a scorer that cannot compare with this right answer at all.
  """
  try:
    return scorer(said, gold)
  except Exception:
    scorer(str(gold[0] if isinstance(gold, list) and gold else gold), gold)
    return 0.0
