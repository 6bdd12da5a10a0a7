"""Plans which tokens of which trajectory lie in which row: few shapes, dense rows, and room for every batch.

Only a segment has to fit a row. A trajectory longer than a row is cut between segments into parts, each as long as a
row holds. Two parts that follow each other are longer than a row together, so those of cut trajectories are fewer than
three for each row that is needed, which bounds `types.Pieces`.

A batch that needs more rows than any of the row counts gets the next multiple of the largest. Nothing is dropped, and
the step is computed in as many times more micro-batches, so that it needs no more memory for activations.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sao_jax.episode import Trajectory
from sao_jax.errors import ConfigError

PIECES_PER_ROW = 3


class Part(NamedTuple):
  """A trajectory, or some consecutive segments of it, that lie next to each other in a row.

  Attributes:
    trajectory: index of the trajectory.
    start: index of the first token in the trajectory.
    stop: index behind its last token.
  """

  trajectory: int
  start: int
  stop: int

  @property
  def length(self) -> int:
    """Number of tokens."""
    return self.stop - self.start


class RowPlan(NamedTuple):
  """The rows of a batch.

  Attributes:
    shape: (B, T).
    rows: the parts of each row, one behind the other; at most B.
  """

  shape: tuple[int, int]
  rows: list[list[Part]]

  @property
  def cuts(self) -> bool:
    """Does any trajectory lie in several parts?"""
    return any(part.start > 0 for row in self.rows for part in row)


def plan_rows(trajectories: Sequence[Trajectory], row_lengths: Sequence[int], row_counts: Sequence[int]) -> RowPlan:
  """Puts the longest parts first, each into the fullest row that still holds it.

  T is the smallest row length that holds the longest trajectory, or a larger one if the rows would be too many; the
  largest where trajectories must be cut. B is the smallest row count that suffices, or a multiple of the largest.

  Args:
    trajectories: longest first.
    row_lengths: choices of T.
    row_counts: choices of B.

  Raises:
    ConfigError: a segment fits no row.
  """
  longest = max((trajectory.longest_segment for trajectory in trajectories), default=0)
  if longest > max(row_lengths):
    remedy = f"raise the largest of rollout.row_lengths to {longest}, or lower sampler.context_length"
    raise ConfigError(
      "rollout.row_lengths", f"a context of {longest} tokens fits no row of {tuple(row_lengths)}", remedy
    )

  # The shortest rows of which few enough are needed; whole trajectories, if any row holds the longest.
  lengths = sorted(row_lengths)
  whole = [length for length in lengths if all(len(trajectory) <= length for trajectory in trajectories[:1])]
  for length in whole or lengths[-1:]:
    parts = [part for index, trajectory in enumerate(trajectories) for part in _cut(index, trajectory, length)]
    parts.sort(key=lambda part: -part.length)  # stable: equal ones stay in the order of their trajectories
    rows = _best_fit(parts, length)
    counts = [count for count in row_counts if count >= len(rows)]
    if counts:
      return RowPlan((min(counts), length), rows)
  return RowPlan((_grown(max(row_counts), len(rows)), length), rows)


def _cut(index: int, trajectory: Trajectory, row_length: int) -> Iterator[Part]:
  """Yields the trajectory in as few consecutive parts as rows of this length hold."""
  begin = 0
  if len(trajectory) > row_length:
    starts = np.flatnonzero(trajectory.begins).tolist()
    for start, stop in itertools.pairwise([*starts, len(trajectory)]):
      if stop - begin > row_length:
        yield Part(index, begin, start)
        begin = start
  yield Part(index, begin, len(trajectory))


def _best_fit(parts: Sequence[Part], row_length: int) -> list[list[Part]]:
  """Returns rows of parts, which come longest first; each joins the row with the least space that suffices."""
  rows: list[list[Part]] = []
  space: list[tuple[int, int]] = []  # (tokens left, row), sorted
  for part in parts:
    at = bisect.bisect_left(space, (part.length, -1))
    left, row = space.pop(at) if at < len(space) else (row_length, len(rows))
    if row == len(rows):
      rows.append([])
    rows[row].append(part)
    bisect.insort(space, (left - part.length, row))
  return rows


def _grown(largest: int, needed: int) -> int:
  """Returns the smallest of 2, 3, 4, 6, 8, 12, ... times the largest row count that suffices: few shapes to compile."""
  multiples = itertools.chain.from_iterable((2 << doubling, 3 << doubling) for doubling in itertools.count())
  return next(multiple * largest for multiple in multiples if multiple * largest >= needed)
