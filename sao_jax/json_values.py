"""JSON values: what comes back from a checkpoint, or a line of a log, equal to what went in. Everything else is named.

>>> unstorable({"question": "3 + 4", "choices": [7, 8.5, None, True]})
>>> unstorable({"rows": [{"size": (3, 4)}]}, "data")
"data['rows'][0]['size'] is a tuple, which would come back as a list"
"""

from __future__ import annotations

import math
from typing import Any

MAX_DEPTH = 100  # of lists and objects within each other; a cycle has no end
MAX_BITS = 10_000  # of an integer; Python neither writes nor reads numbers of many thousand digits

_INSTEAD = {
  "tuple": "which would come back as a list",
  "bytes": "which JSON cannot hold; decode it to text",
  "set": "which JSON cannot hold; make it a sorted list",
  "datetime": "which JSON cannot hold; write it as text, with isoformat()",
  "ndarray": "which JSON cannot hold; make it a list, with tolist()",
}


def unstorable(value: Any, path: str = "value") -> str | None:
  """Names the first thing in `value` that would not come back equal, with its place behind `path`; None without any.

  Storable are None, True, False, int, finite float, str that UTF-8 can encode, and lists and dicts with string keys of
  such values. Types count exactly: a NumPy number, an enum or a defaultdict would come back as something else.
  """
  return _unstorable(value, path, 0)


def storable_text(text: str) -> bool:
  """Tells whether UTF-8 can encode a text: halves of a surrogate pair are no characters."""
  try:
    text.encode("utf-8")
  except UnicodeEncodeError:
    return False
  return True


def _unstorable(value: Any, path: str, depth: int) -> str | None:
  kind = type(value)
  # Plain values.
  if value is None or kind is bool:
    return None
  if kind is int:
    return None if value.bit_length() <= MAX_BITS else f"{path} is an integer of {value.bit_length()} bits"
  if kind is float:
    return None if math.isfinite(value) else f"{path} is {value}, which is no number in JSON"
  if kind is str:
    return None if storable_text(value) else f"{path} holds half of a surrogate pair, which is no character"
  if kind not in (list, dict):
    return f"{path} is a {kind.__name__}, {_INSTEAD.get(kind.__name__, 'which would not come back as it is')}"

  # Containers, depth first, so that a cycle ends at the bound.
  if depth >= MAX_DEPTH:
    return f"{path[:40]}... lies deeper than {MAX_DEPTH} levels, or contains itself"
  if kind is list:
    items = ((item, f"{path}[{index}]") for index, item in enumerate(value))
  else:
    for key in value:
      if type(key) is not str or not storable_text(key):
        return f"{path} has the key {key!r:.80}; keys must be text"
    items = ((item, f"{path}[{key!r}]") for key, item in value.items())
  return next(filter(None, (_unstorable(item, place, depth + 1) for item, place in items)), None)
