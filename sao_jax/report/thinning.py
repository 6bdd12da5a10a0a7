"""Metric lines of a long run in bounded memory: only what is drawn, and as many points as a figure can show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

Line = dict[str, Any]

POINTS = 4096  # lines of steps that are kept at most, several times the width of a figure in pixels
ALARMS = "alarms"  # of a step: what the health rules said
LAST = ("step", "phase", "policy_version")  # of a merged line these are the last ones


def thinned(lines: Iterable[Line], names: Collection[str], points: int = POINTS) -> list[Line]:
  """Reads `lines` one by one, and keeps of each what `names` lists, in order of the steps.

  Beyond `points` lines, equally many neighbours are merged into each: numbers into their mean, histograms into their
  sum. Lines of evaluations and those with alarms, which are few, stay as they are.
  """
  kept, whole_lines, pending, width = [], [], [], 1
  wanted = {*names, "step"}
  for full in lines:
    line = {name: value for name, value in full.items() if name in wanted}
    if "heldout_success" in line or line.get(ALARMS):
      whole_lines.append(line)
      continue

    # A window is full: it becomes one line; too many lines: their windows become twice as wide.
    pending.append(line)
    if len(pending) == width:
      kept.append(merged(pending))
      pending = []
    if len(kept) >= points:
      kept = [merged(kept[first : first + 2]) for first in range(0, len(kept), 2)]
      width *= 2

  if pending:
    kept.append(merged(pending))
  return sorted([*kept, *whole_lines], key=lambda line: line["step"])


def merged(lines: Sequence[Line]) -> Line:
  """Merges neighbours into one line."""
  if len(lines) == 1:
    return lines[0]
  names = dict.fromkeys(name for line in lines for name in line)
  return {name: _merge(name, [line[name] for line in lines if line.get(name) is not None]) for name in names}


def _merge(name: str, values: Sequence[Any]) -> Any:
  if not values:
    return None
  if name in LAST or isinstance(values[-1], str):
    return values[-1]
  if isinstance(values[-1], list):
    longest = max(map(len, values))
    return [sum(value[i] or 0 for value in values if i < len(value)) for i in range(longest)]
  return sum(values) / len(values)
