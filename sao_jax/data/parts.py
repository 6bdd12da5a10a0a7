"""Numbering through several parts, one behind the other: files of a data set, row groups of a file."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence


def ends_of(sizes: Iterable[int]) -> list[int]:
  """Returns where each part ends, given how many items the parts have.

  >>> ends_of([2, 0, 3])
  [2, 2, 5]
  """
  return list(itertools.accumulate(sizes))


def total(ends: Sequence[int]) -> int:
  """Returns how many items all parts have together."""
  return ends[-1] if ends else 0


def locate(ends: Sequence[int], index: int) -> tuple[int, int]:
  """Returns the part that holds an item, and the item's number within it.

  >>> locate([2, 2, 5], 2)
  (2, 0)

  Raises:
    IndexError: there is no such item.
  """
  if not 0 <= index < total(ends):
    raise IndexError(index)
  part = bisect.bisect_right(ends, index)
  return part, int(index) - (ends[part - 1] if part else 0)
