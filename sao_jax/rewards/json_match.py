"""Verifier of JSON answers: the same value, whatever its layout, the order of its keys and the spelling of numbers."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_text import without_thinking

TOLERANCE = 1e-9  # of numbers, relative to the larger one
MAX_DEPTH = 64  # of lists and objects in one another
FENCE = re.compile(r"^```[^\n`]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class _NotJson(ValueError):
  """A text that is no JSON value, or one that could be read in two ways."""


def json_match(said: str, gold: Any) -> float:
  """Returns 1.0 when the JSON value that was said equals the right one, else 0.0.

  Said is the last fenced block behind the thinking, or without any all that stands there. Objects are equal in any
  order of their keys, lists in the same order, numbers within 1e-9 of the larger one (1, 1.0 and 1e0 are the same),
  texts character by character; true is not 1, and null is not a missing key. A key that stands twice, NaN, infinities
  and more than 64 levels are no answer.

  Args:
    said: the policy's text.
    gold: the right value, or its JSON text when it is a `str` (of a right answer that is a text: `"\\"yes\\""`).

  >>> json_match('{"b": [2.0], "a": 1}', {"a": 1, "b": [2]}), json_match("```json\\n[1, 2]\\n```", "[2, 1]")
  (1.0, 0.0)
  """
  spoken = without_thinking(said)
  if spoken is None:
    return 0.0
  fenced = FENCE.findall(spoken)
  try:
    answer = _read(fenced[-1] if fenced else spoken)
  except _NotJson:
    return 0.0
  return float(_equal(answer, _read(gold) if isinstance(gold, str) else gold))


def check_json(gold: Any, field: str = "gold") -> None:
  """Checks a right answer for `json_match`.

  Raises:
    ConfigError: naming `field`, when it is neither a JSON value nor the text of one.
  """
  try:
    _read(gold if isinstance(gold, str) else json.dumps(gold))
  except (TypeError, ValueError, RecursionError) as error:
    raise ConfigError(
      field, f"{gold!r:.80} is no JSON value: {error}.", "Correct it, or use another scorer."
    ) from error


def _read(text: str) -> Any:
  try:
    value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    _check_depth(value, MAX_DEPTH)
  except (ValueError, RecursionError) as error:
    raise _NotJson(str(error)) from None
  return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) != len(pairs):
    raise _NotJson("a key stands twice in an object")
  return value


def _constant(name: str) -> Any:
  raise _NotJson(f"{name} is no JSON number")


def _check_depth(value: Any, left: int) -> None:
  if isinstance(value, dict | list):
    if not left:
      raise _NotJson(f"more than {MAX_DEPTH} levels")
    for inner in value.values() if isinstance(value, dict) else value:
      _check_depth(inner, left - 1)
  elif isinstance(value, float) and not math.isfinite(value):
    raise _NotJson("a number beyond the range of floats")


def _equal(answer: Any, gold: Any) -> bool:
  if isinstance(gold, dict):
    same_keys = isinstance(answer, dict) and answer.keys() == gold.keys()
    return same_keys and all(_equal(answer[key], value) for key, value in gold.items())
  if isinstance(gold, list | tuple):
    same_length = isinstance(answer, list) and len(answer) == len(gold)
    return same_length and all(map(_equal, answer, gold))
  if _is_number(gold) and _is_number(answer):
    # Integers are compared exactly. With a float, one that no float can hold is too far from it.
    if isinstance(answer, int) and isinstance(gold, int):
      return answer == gold
    try:
      return math.isclose(answer, gold, rel_tol=TOLERANCE)
    except OverflowError:
      return False
  return type(answer) is type(gold) and answer == gold


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)
