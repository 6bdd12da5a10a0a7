"""The host-side numbers of a step, of all processes as one: sums of what they did, maxima of times, means else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sao_jax.learner.setup import Learner
from sao_jax.parallel.agreement import Processes
from sao_jax.report.by_environment import weight_of
from sao_jax.report.metrics import to_json
from sao_jax.types import PyTree

# Beginnings and ends of the names of numbers that add up.
SUMMED = (
  *("rollouts_", "num_", "masked_tokens", "retries", "cancelled", "run_", "demonstrations_skipped"),
  "environment_trajectories",
)
SUMMED_ENDS = ("_per_second", "_turns")
MAXIMA = ("seconds", "step_seconds", "event_loop_gap", "environment_names_left_out")
MEANS = ("run_drop_rate_by_length",)


def reduced(processes: Processes, metrics: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the numbers of all processes to the one that writes, as one; the others, and one alone, get their own.

  The batch of every process that brings one has as many trajectories as that of the others, so a mean over processes is
  that over trajectories. Means over other things (episodes generated, seconds of slots) count every process the same
  that knows of them; those of an environment count by the episodes that it has there.
  """
  if processes.count == 1:
    return dict(metrics)
  values = processes.to_writer("the numbers of a step", to_json(metrics))
  if values is None:
    return dict(metrics)
  names = dict.fromkeys(itertools.chain(*values))
  of = lambda name: [each.get(name) for each in values]
  return {
    name: _weighted(of(name), of(weight)) if (weight := weight_of(name)) else _reduce(name, of(name)) for name in names
  }


def of_a_step_that_is_done(learner: Learner, state: PyTree, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
  """Waits until all learners have done a step, where others only sample, and gives these its numbers.

  The next program with the samplers, which brings rows or weights, begins at once then: their devices would wait in it
  for a step that is under way, and sample nothing meanwhile. Where all processes learn, nothing is waited for.
  """
  if not learner.devices.apart:
    return metrics
  processes = learner.processes
  with processes.busy():
    jax.block_until_ready(state)
  plain = jax.tree.map(lambda value: np.asarray(value).tolist(), metrics) if processes.is_writer else None
  known = processes.first("a step that is done", plain)
  return metrics if learner.learns else known


def _weighted(means: Sequence[float | None], weights: Sequence[float | None]) -> float:
  """Makes one mean of those of all processes; None stands for a process that has nothing to average over."""
  known = [(mean, weight) for mean, weight in zip(means, weights) if mean is not None and weight]
  total = sum(weight for _, weight in known)
  return sum(mean * weight for mean, weight in known) / total if total else math.nan


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
