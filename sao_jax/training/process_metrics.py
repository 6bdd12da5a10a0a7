"""The host-side numbers of a step, of all processes as one: sums of what they did, maxima of times, means else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.parallel.agreement import Processes
from sao_jax.report.metrics import to_json

# Beginnings and ends of the names of numbers that add up.
SUMMED = ("rollouts_", "num_", "masked_tokens", "retries", "cancelled", "run_", "demonstrations_skipped")
SUMMED_ENDS = ("_per_second", "_turns")
MAXIMA = ("seconds", "step_seconds", "event_loop_gap")
MEANS = ("run_drop_rate_by_length",)


def reduced(processes: Processes, metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the numbers of all processes to the one that writes, as one; the others, and one alone, get their own.

  The batch of every process has as many trajectories as that of the others, so a mean over processes is that over
  trajectories. Means over other things (episodes generated, seconds of slots) count every process the same.
  """
  if processes.count == 1:
    return dict(metrics)
  values = processes.to_writer("the numbers of a step", to_json(metrics))
  return (
    dict(metrics)
    if values is None
    else {name: _reduce(name, [each.get(name) for each in values]) for name in values[0]}
  )


def _reduce(name: str, values: Sequence[Any]) -> Any:
  """Makes one value of those of all processes; None stands for what is undefined there."""
  # Tables (by reason, by length) are reduced entry by entry.
  if any(isinstance(value, Mapping) for value in values):
    tables = [value or {} for value in values]
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: _reduce(name, [table[key] for table in tables if key in table]) for key in keys}

  # What is undefined somewhere is made of the others.
  known = [value for value in values if value is not None]
  if not known:
    return math.nan

  if name in MAXIMA:
    return max(known)
  if name not in MEANS and (name.startswith(SUMMED) or name.endswith(SUMMED_ENDS)):
    return sum(known)
  return sum(known) / len(known)
