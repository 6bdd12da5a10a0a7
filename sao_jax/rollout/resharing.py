"""The rollout sides of several processes, divided anew over another number of them: nothing is lost or done twice."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state
from sao_jax.rollout.statistics import SUMS

State = tuple[dict[str, Any], dict[str, np.ndarray]]  # of `RolloutLoop.state_dict`

OF_ALL = ("seconds", "steps", "busy_seconds")  # sums that count the same in every process: time, and steps


def reshare_rollouts(states: Sequence[State], index: int, count: int) -> State:
  """Returns the state of process `index` of `count`, made of those of all processes that saved.

  Groups of rollouts are dealt out, whole, those first that were finished first. They get new numbers, beyond all that
  were used, since a number stands for random numbers as well. Counters of the run, which metrics add up over processes,
  go on in process 0.
  """
  intakes = [state["intake"] for state, _ in states]
  size = intakes[0].get("group_size", 1)
  first = max(intake["next_rollout_id"] for intake in intakes)

  # Whole groups: what is finished of them, in the order of the buffers, and what is to be rolled out.
  groups = _groups(states, size)
  finished, unfinished = [], []
  for number, (trajectories, prompts) in enumerate(groups):
    if number % count == index:
      renumbered = lambda rollout_id, number=number: first + number * size + rollout_id % size
      finished += [dataclasses.replace(each, rollout_id=renumbered(each.rollout_id)) for each in trajectories]
      unfinished += [[renumbered(rollout_id), *prompt] for rollout_id, *prompt in prompts]

  # The ledger's counters: a process has what it holds, and the first one what has ended.
  records, arrays = trajectories_to_state(finished)
  admissions = [state["buffer"]["admission"] for state, _ in states] if index == 0 else []
  outcomes = _added(admission["outcomes"] for admission in admissions)
  buffer = {
    "version": max(state["buffer"]["version"] for state, _ in states),
    "admission": {
      "submitted": len(finished) + len(unfinished) + sum(outcomes.values()),
      "in_flight": len(unfinished),
      "buffered": len(finished),
      "outcomes": outcomes,
      "reasons": _added(admission["reasons"] for admission in admissions),
    },
    "statistics": _statistics([state["buffer"]["statistics"] for state, _ in states], alone=index == 0),
  }

  # Baselines of all processes go into each, whose prompts are not those that it had.
  if any("baselines" in state["buffer"] for state, _ in states):
    buffer["baselines"] = [window for state, _ in states for window in state["buffer"].get("baselines", ())]

  # What is rolled out again comes first, in the order of its new numbers; then what nobody has drawn.
  intake = {
    "next_rollout_id": first + len(groups) * size,
    "group_size": size,
    "unfinished": sorted(unfinished, key=lambda entry: entry[0]),
    "prompts": {"shares": [each["prompts"] for each in intakes]},
  }
  return {"intake": intake, "buffer": buffer, "trajectories": records}, arrays


def _groups(states: Sequence[State], size: int) -> list[tuple[list[Any], list[Any]]]:
  """Returns (trajectories, unfinished entries) of every group, one process after the other in turn."""
  of_processes = []
  for state, arrays in states:
    groups: dict[int, tuple[list[Any], list[Any]]] = {}
    for trajectory in trajectories_from_state(state["trajectories"], arrays):
      groups.setdefault(trajectory.rollout_id // size, ([], []))[0].append(trajectory)
    for entry in state["intake"]["unfinished"]:
      groups.setdefault(entry[0] // size, ([], []))[1].append(entry)
    of_processes.append(groups.values())
  in_turn = itertools.zip_longest(*of_processes)
  return [group for round_ in in_turn for group in round_ if group is not None]


def _statistics(states: Sequence[Mapping[str, Any]], *, alone: bool) -> dict[str, Any]:
  """Returns the sums and histograms of all processes for the one that goes on with them, empty ones for the others."""
  # Times and steps are those of the run; counts go on in one place.
  sums = dict.fromkeys(SUMS, 0)
  for name in SUMS:
    values = [state["sums"].get(name, 0) for state in states]
    if name in OF_ALL:
      sums[name] = max(values)
    elif alone:
      sums[name] = sum(values)
  histograms = ("token_lags", "generated_lengths", "dropped_lengths")
  return {
    "sums": sums,
    **{name: sorted(_added(dict(state[name]) for state in (states if alone else ())).items()) for name in histograms},
    "recent_seconds": [seconds for state in states for seconds in state.get("recent_seconds", ())],
  }


def _added(counts: Any) -> dict[Any, int]:
  """Adds tables of counts."""
  total: collections.Counter = collections.Counter()
  for each in counts:
    total.update(each)
  return dict(total)
