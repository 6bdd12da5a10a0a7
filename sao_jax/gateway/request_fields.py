"""Fields of a request's JSON: read with their types and bounds, or refused by name. None is overlooked in silence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NoReturn

from sao_jax.gateway.exchange import RequestRefused
from sao_jax.json_values import MAX_DEPTH, unstorable

HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that may be half of a surrogate pair
EMPTY = (None, [], {}, "")  # values that say as much as no value


def read_body(body: bytes) -> dict[str, Any]:
  """Decodes the body of a request, a JSON object; an empty body is {}.

  Raises:
    RequestRefused: it is none, or holds what no tokenizer takes: half a surrogate pair, a number that is none.
  """
  if not body.strip():
    return {}
  try:
    value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
  except (ValueError, RecursionError) as error:  # ValueError: of JSON, of UTF-8, of integers with thousands of digits
    problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
    raise RequestRefused(400, f"The body is no valid JSON: {problem}.", code="invalid_json") from error
  if not isinstance(value, dict):
    raise RequestRefused(400, "The body must be a JSON object.", code="invalid_json")

  # A walk over all values takes longer than all the rest, and few bodies need it.
  if HALF_A_PAIR.search(body) or _is_deep(value):
    problem = unstorable(value, "body")
    if problem is not None:
      raise RequestRefused(400, f"{problem}.", code="invalid_json")
  return value


def _refuse_constant(name: str) -> NoReturn:
  raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
  value = float(text)
  if math.isinf(value):
    raise ValueError(f"{text[:40]} is larger than any float")
  return value


def _is_deep(value: Any) -> bool:
  """Tells if containers lie within each other deeper than is allowed, level by level."""
  level = [value]
  for _ in range(MAX_DEPTH - 1):
    level = [
      item
      for container in level
      for item in (container.values() if isinstance(container, dict) else container)
      if isinstance(item, dict | list)
    ]
    if not level:
      return False
  return True


def refuse(param: str, problem: str, code: str = "invalid_value") -> RequestRefused:
  """The refusal of one field; `problem` goes on behind its name."""
  return RequestRefused(400, f"{param}: {problem}", param=param, code=code)


def unsupported(param: str, problem: str = "this server does not support it.") -> RequestRefused:
  """The refusal of a field, or of a value, that OpenAI's API has and this server has not."""
  return refuse(param, problem, "unsupported_parameter")


def check_known(value: Mapping[str, Any], known: Container[str], where: str = "") -> None:
  """Refuses the first key that is not known, unless its value says nothing; `where` is the path of `value`."""
  for key in value:
    if key not in known and value[key] not in EMPTY and value[key] is not False:
      raise refuse(f"{where}{key}", "there is no such field.", "unknown_parameter")


def check_defaults(value: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
  """Refuses fields whose values ask for more than they do by default: name -> the values that do not."""
  for name, values in allowed.items():
    given = value.get(name)
    if given not in EMPTY and not any(given == each and type(given) is type(each) for each in values):
      raise unsupported(name, f"this server does not support {json.dumps(given)[:100]}.")


def text_of(value: Mapping[str, Any], name: str, where: str = "") -> str | None:
  """Reads a text; None where there is none."""
  found = value.get(name)
  if found is not None and not isinstance(found, str):
    raise refuse(f"{where}{name}", "it must be a string.", "invalid_type")
  return found


def flag_of(value: Mapping[str, Any], name: str, where: str = "") -> bool:
  """Reads a boolean; False where there is none."""
  found = value.get(name)
  if found is not None and not isinstance(found, bool):
    raise refuse(f"{where}{name}", "it must be true or false.", "invalid_type")
  return bool(found)


def whole_number_of(value: Mapping[str, Any], name: str, lowest: int, highest: int) -> int | None:
  """Reads an integer within bounds; None where there is none."""
  found = value.get(name)
  if found is None:
    return None
  if isinstance(found, bool) or not isinstance(found, int):
    raise refuse(name, "it must be an integer.", "invalid_type")
  if not lowest <= found <= highest:
    raise refuse(name, f"{found} is not between {lowest} and {highest}.", "integer_out_of_bounds")
  return found


def number_of(value: Mapping[str, Any], name: str, lowest: float, highest: float) -> float | None:
  """Reads a number within bounds; None where there is none."""
  found = value.get(name)
  if found is None:
    return None
  if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
    raise refuse(name, "it must be a number.", "invalid_type")
  if not lowest <= found <= highest:
    raise refuse(name, f"{found} is not between {lowest} and {highest}.", "decimal_out_of_bounds")
  return float(found)


def object_of(value: Any, param: str) -> Mapping[str, Any]:
  """Takes a JSON object; anything else is refused as `param`."""
  if not isinstance(value, dict):
    raise refuse(param, "it must be an object.", "invalid_type")
  return value


def list_of(value: Any, param: str) -> list[Any]:
  """Takes a JSON list; anything else is refused as `param`."""
  if not isinstance(value, list):
    raise refuse(param, "it must be a list.", "invalid_type")
  return value
