r"""Verifier of mathematical answers: math-verify, an optional package (extra `envs`), between guards of our own.

math-verify parses LaTeX to sympy and compares values, sets, intervals, tuples, matrices and equations. Ours is:

* `boxed_math_match`: the answer is the last box behind the thinking, see `answer_text`, and nothing without a box;
* plain notation, see `math_text`: `pi/2`, `2**10`, `1.5e3`, `1 000`, `5 km/h`, `2 1/2`, `0.\overline{3}`;
* answers that are words: a choice A to J, `\text{...}` and names are compared as text, in any case;
* values that differ relatively are different, see `math_values`: 1/2^99 is not 1/2^98, nor 1/2004! 1/2006!;
* `3 = 4` is no way to say 4, and 101_2 is not 101_3;
* bounds: an answer of more than 300 characters, or 10 brackets in one another, with numbers beyond 2^100000, or with
  a sum, integral or limit that the right one has not, is wrong before anything is computed. Only math-verify's LaTeX
  reader is used: its other one hands text to a parser of Python.

Units and degrees are dropped, as math-verify has it, and `25\%` is 25 as well as 0.25. A decimal number is right within
1e-5 of the exact one, and to 6 decimals. What still takes too long is ended by the `GraderPool`, as a failure of the
grader, never a 0.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_text import boxed_answer, last_box, spoken_answer
from sao_jax.rewards.math_text import bracket_depth, is_text, to_latex, words_of
from sao_jax.rewards.math_values import differ, holds_operators, is_bounded, with_positive_variables, without_percent

MAX_LENGTH, MAX_DEPTH = 300, 10  # characters of an answer, and brackets in one another: readers take long for more
LARGE_BINOMIAL = re.compile(r"\\(?:[dt]?binom|choose)\b.*\d{5}|\d{5}.*\\choose\b", re.DOTALL)  # computed while reading
WITH_BASE = re.compile(r"(-?[0-9A-Za-z]+)_\{?(\d+)\}?")


def math_match(said: str, gold: str | float) -> float:
  r"""Returns 1.0 when an answer has the value of the right one, else 0.0.

  Give it to a `GraderPool`: sympy may compute for long.

  Args:
    said: the answer, as LaTeX or plain text; of a text with boxes the last one counts.
    gold: the right answer, likewise, or a number.

  Raises:
    ValueError: the right answer cannot be read, see `check_gold`.

  >>> math_match(r"\frac12", "0.5"), math_match("1/3", "0.5")
  (1.0, 0.0)
  """
  return _grade(spoken_answer(said), gold)


def boxed_math_match(said: str, gold: str | float) -> float:
  r"""Grades a whole reply as `math_match` does an answer: the last box behind the thinking; 0.0 without one.

  >>> boxed_math_match(r"Thus \boxed{\frac12}.", "0.5"), boxed_math_match("Thus 0.5.", "0.5")
  (1.0, 0.0)
  """
  return _grade(boxed_answer(said), gold)


def _grade(answer: str | None, gold: Any) -> float:
  right, tree = _read_gold(gold)
  if not answer or not answer.strip():
    return 0.0

  # Words first: letters in a row are variables to math-verify.
  words = words_of(answer)
  if words is not None and words == words_of(right):
    return 1.0
  return 0.0 if is_text(right) else float(_same(tree, answer, right))


def check_gold(gold: Any, field: str = "gold") -> None:
  """Checks a right answer, when the data are loaded: it can be read, and is not too large to compute with.

  Raises:
    ConfigError: naming `field`, with the answer.
  """
  try:
    _read_gold(gold)
  except ValueError as error:
    raise ConfigError(field, f"{error}.", "Correct it in the data, or use another scorer.") from error


def _read_gold(gold: Any) -> tuple[str, Any]:
  """Returns the text of a right answer without its box, and its tree; None for the tree of words."""
  if isinstance(gold, bool) or not isinstance(gold, str | int | float):
    raise ValueError(f"{gold!r:.80} is no mathematical answer")
  text = str(gold)
  box = last_box(text)
  text = text if box is None else box
  if is_text(text):
    return text, None
  tree = _parse(text)
  if tree is None:
    raise ValueError(f"{gold!r:.80} cannot be read as a mathematical answer")
  return text, tree


def _parse(text: str) -> Any:
  """Parses an answer to sympy's tree; None for one that cannot be read, or is too large."""
  import math_verify
  import sympy

  logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time-outs that the pool keeps
  if not text.strip() or len(text) > MAX_LENGTH or bracket_depth(text) > MAX_DEPTH or LARGE_BINOMIAL.search(text):
    return None
  found = math_verify.parse(
    rf"\boxed{{{to_latex(text)}}}", [math_verify.LatexExtractionConfig()], "no_fallback", parsing_timeout=None
  )
  tree = found[0] if found else None
  return tree if isinstance(tree, sympy.Basic | sympy.MatrixBase) and is_bounded(tree) else None


def _same(tree: Any, answer: str, right: str) -> bool:
  """Compares an answer's text with a right answer and its tree."""
  import math_verify
  import sympy

  if len(answer) > MAX_LENGTH:
    return False  # before any pattern reads it

  # Bases are written as indices, which math-verify drops.
  bases = [WITH_BASE.fullmatch(to_latex(text)) for text in (answer, right)]
  if all(bases) and bases[0].group(2) != bases[1].group(2):
    return False

  other = _parse(answer)
  if other is None or (holds_operators(other) and not holds_operators(tree)):
    return False
  if isinstance(other, sympy.Eq) and not other.free_symbols and differ(other.lhs, other.rhs):
    return False  # 3 = 4
  if differ(*_values(tree, other)):
    return False

  # Values that agree are equal if math-verify can show it, for variables of any sign or, where both are real, positive.
  def equal(one: Any, another: Any) -> bool:
    return math_verify.verify(one, another, allow_set_relation_comp=True, timeout_seconds=None)

  if equal(tree, other) or equal(without_percent(tree), other) or equal(tree, without_percent(other)):
    return True
  symbolic = isinstance(tree, sympy.Expr) and isinstance(other, sympy.Expr) and bool(tree.free_symbols)
  return symbolic and equal(*map(with_positive_variables, (tree, other)))


def _values(one: Any, other: Any) -> tuple[Any, Any]:
  """Returns the right sides of equations that are compared with a value, as x = 3 with 3."""
  import sympy

  sides = [isinstance(tree, sympy.Eq) for tree in (one, other)]
  if sides[0] == sides[1]:
    return one, other
  return one.rhs if sides[0] else one, other.rhs if sides[1] else other
