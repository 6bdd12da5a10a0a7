"""Packs trajectories into rows of a few fixed shapes, so that nothing recompiles, and shards the rows over the mesh.

Host code on numpy arrays; only `shard_batch` touches devices. Shape letters: B rows, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sao_jax.episode import Trajectory
from sao_jax.errors import ConfigError
from sao_jax.learner.row_plan import PIECES_PER_ROW, Part, RowPlan, plan_rows
from sao_jax.parallel.feeding import feed
from sao_jax.parallel.layout import Layout
from sao_jax.types import Pieces, TrajectoryBatch


def check_row_counts(row_counts: Sequence[int], multiple_of: int) -> None:
  """Refuses row counts that do not divide over the mesh, of which the configuration alone does not know the size.

  Raises:
    ConfigError: naming those that are no multiples of micro-batches times data shards.
  """
  wrong = [count for count in row_counts if count % multiple_of]
  if wrong:
    raise ConfigError(
      "rollout.row_counts",
      f"{wrong} are not multiples of {multiple_of} (micro-batches times data shards)",
      f"choose multiples of {multiple_of}, or change algorithm.micro_batches or the mesh",
    )


def pack(
  trajectories: Sequence[Trajectory],
  row_lengths: Sequence[int],
  row_counts: Sequence[int],
  multiple_of: int = 1,
  routed_shape: tuple[int, int] | None = None,
  *,
  grouped: bool = False,
  baselines: bool = False,
) -> TrajectoryBatch:
  """Packs trajectories, longest first, each into the fullest row that still holds it, see `row_plan.plan_rows`.

  Those longer than the longest row are cut between their segments. The result depends on the trajectories alone, not on
  their order.

  Args:
    trajectories: every token ends up in one row, once and in order.
    row_lengths: choices of T.
    row_counts: choices of B, multiples of `multiple_of`; for a batch that needs more rows, B is a multiple of the
      largest.
    multiple_of: micro-batches times data shards.
    routed_shape: (L, k) packs the routed experts too, -1 for trajectories without any; None leaves them out.
    grouped: numbers the groups of the trajectories, 1, 2, ... in the order of their first rollouts.
    baselines: packs what each trajectory's return is compared with.

  Returns:
    A batch of numpy arrays.

  Raises:
    ConfigError: when a segment fits no row, or a row count is no multiple.

  >>> from sao_jax.episode import PromptKey, Status
  >>> def episode(rollout_id, length):
  ...   sampled = np.arange(length) > 0
  ...   return Trajectory(
  ...     token_ids=np.arange(7, 7 + length, dtype=np.int32),
  ...     action_mask=sampled,
  ...     behavior_logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
  ...     policy_version=np.where(sampled, 0, -1).astype(np.int32),
  ...     turn_starts=np.array([1], np.int32),
  ...     reward=1.0,
  ...     status=Status.TERMINATED,
  ...     key=PromptKey("toy", rollout_id, 0),
  ...     rollout_id=rollout_id,
  ...   )
  >>> batch = pack([episode(0, 3), episode(1, 4)], row_lengths=(4, 8), row_counts=(1,))
  >>> batch.token_ids.tolist(), batch.trajectory_ids.tolist()
  ([[7, 8, 9, 10, 7, 8, 9, 0]], [[1, 1, 1, 1, 2, 2, 2, 0]])
  >>> batch.rewards.tolist()
  [[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]]
  """
  check_row_counts(row_counts, multiple_of)

  ordered = in_order(trajectories)
  plan = plan_rows(ordered, row_lengths, row_counts)
  return lay_out(ordered, plan, routed_shape, grouped=grouped, baselines=baselines)


def in_order(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
  """Returns them longest first, ties by rollout id: the order in which they come must not matter."""
  return sorted(trajectories, key=lambda t: (-len(t), t.rollout_id))


def unpack(batch: TrajectoryBatch) -> Iterator[dict[str, np.ndarray]]:
  """Yields the fields of every trajectory, [length] each: the inverse of `pack`, for tests and inspection.

  Row by row, and behind them those in several pieces.
  """
  fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name != "pieces"}
  fields = {name: np.asarray(values) for name, values in fields.items() if values is not None}
  pieces: dict[int, list[dict[str, np.ndarray]]] = {}
  for row, trajectory_ids in enumerate(fields["trajectory_ids"]):
    for trajectory in range(1, trajectory_ids.max(initial=0) + 1):
      inside = trajectory_ids == trajectory
      of_row = {name: values[row][inside] for name, values in fields.items()}
      piece = 0 if batch.pieces is None else int(np.asarray(batch.pieces.ids)[row][inside][0])
      if not piece:
        yield of_row
      pieces[piece] = of_row

  # The pieces of one trajectory, in order.
  numbers = [] if batch.pieces is None else np.asarray(batch.pieces.trajectory)
  for trajectory in range(1, max(numbers, default=0) + 1):
    parts = [pieces[piece + 1] for piece in np.flatnonzero(numbers == trajectory)]
    yield {name: np.concatenate([part[name] for part in parts]) for name in fields}


def shard_batch(batch: TrajectoryBatch, layout: Layout, sources: Sequence[int] | None = None) -> TrajectoryBatch:
  """Puts this process's rows on the mesh; the result is the global batch, rows over the batch axes of the mesh.

  Args:
    batch: numpy arrays [B / len(sources), T], of the same shape in every process.
    layout: the learner's mesh, and where "batch" and "sequence" live on it.
    sources: the processes that bring rows; None: this one alone.
  """
  sources = (jax.process_index(),) if sources is None else sources
  return feed(batch, lambda array: sharding_of(array, layout), sources)


def sharding_of(array: Any, layout: Layout) -> jax.sharding.NamedSharding:
  """Returns the sharding of a field of a batch: [B, T, ...], or a table of pieces [P]."""
  return layout.sharding(*("batch", "sequence")[: array.ndim])


def lay_out(
  trajectories: list[Trajectory],
  plan: RowPlan,
  routed_shape: tuple[int, int] | None,
  *,
  grouped: bool,
  baselines: bool = False,
  pieces: bool = False,
) -> TrajectoryBatch:
  """Lays the parts of each row out one behind the other, in arrays [B, T].

  With `pieces` there is a table of pieces even if no trajectory is cut: another process's may be.
  """
  batch = _padding(plan.shape, routed_shape, grouped=grouped, baselines=baselines)
  per_token = [_fields(trajectory) for trajectory in trajectories]
  groups = {group: number for number, group in enumerate(sorted({t.group for t in trajectories}), start=1)}

  places: dict[Part, tuple[int, int]] = {}  # row and column of the first token
  for row, parts in enumerate(plan.rows):
    column = segments = 0
    for number, part in enumerate(parts, start=1):
      places[part] = row, column
      inside = slice(part.start, part.stop)
      at = (row, slice(column, column + part.length))
      for name, values in per_token[part.trajectory].items():
        getattr(batch, name)[at] = values[inside]

      # Segments are numbered through the row.
      batch.trajectory_ids[at] = number
      batch.segment_ids[at] += segments + 1 - batch.segment_ids[row, column]
      column += part.length
      segments = batch.segment_ids[row, column - 1]

      # Of the whole trajectory.
      trajectory = trajectories[part.trajectory]
      batch.truncated[at] = trajectory.status.truncated
      if routed_shape is not None and trajectory.routed_experts is not None:
        batch.routed_experts[at] = trajectory.routed_experts[inside]
      if grouped:
        batch.group_ids[at] = groups[trajectory.group]
      if baselines:
        batch.baselines[at] = trajectory.baseline
  return batch.replace(pieces=_pieces(places, plan.shape, always=pieces))


def _padding(
  shape: tuple[int, int], routed_shape: tuple[int, int] | None, *, grouped: bool, baselines: bool
) -> TrajectoryBatch:
  """Returns a batch of padding only: every field as it stands where no token is."""
  return TrajectoryBatch(
    token_ids=np.zeros(shape, dtype=np.int32),
    segment_ids=np.zeros(shape, dtype=np.int32),
    trajectory_ids=np.zeros(shape, dtype=np.int32),
    positions=np.zeros(shape, dtype=np.int32),
    action_mask=np.zeros(shape, dtype=np.bool_),
    loss_mask=np.zeros(shape, dtype=np.bool_),
    behavior_logprobs=np.full(shape, np.nan, dtype=np.float32),
    policy_version=np.full(shape, -1, dtype=np.int32),
    rewards=np.zeros(shape, dtype=np.float32),
    truncated=np.zeros(shape, dtype=np.bool_),
    routed_experts=None if routed_shape is None else np.full((*shape, *routed_shape), -1, dtype=np.int16),
    group_ids=np.zeros(shape, dtype=np.int32) if grouped else None,
    baselines=np.zeros(shape, dtype=np.float32) if baselines else None,
  )


def _fields(trajectory: Trajectory) -> dict[str, np.ndarray]:
  """Returns the fields of a batch that differ from token to token; positions restart with every segment."""
  begins, index = trajectory.begins, np.arange(len(trajectory), dtype=np.int32)
  return {
    "token_ids": trajectory.token_ids,
    "segment_ids": np.cumsum(begins, dtype=np.int32),
    "positions": index - np.maximum.accumulate(np.where(begins, index, 0)),
    "action_mask": trajectory.action_mask,
    "loss_mask": trajectory.trained,
    "behavior_logprobs": trajectory.behavior_logprobs,
    "policy_version": trajectory.policy_version,
    "rewards": trajectory.token_rewards,
  }


def _pieces(places: dict[Part, tuple[int, int]], shape: tuple[int, int], *, always: bool) -> Pieces | None:
  """Returns the table of the trajectories that have several parts; None where every one lies in one place."""
  cut = sorted({part.trajectory for part in places if part.start > 0})
  if not cut and not always:
    return None
  numbers = {trajectory: number for number, trajectory in enumerate(cut, start=1)}
  pieces = sorted(part for part in places if part.trajectory in numbers)

  table = Pieces(np.zeros(shape, np.int32), *np.zeros((3, PIECES_PER_ROW * shape[0]), np.int32))
  for index, part in enumerate(pieces):
    row, column = places[part]
    table.ids[row, column : column + part.length] = index + 1
    table.trajectory[index] = numbers[part.trajectory]
    table.row[index], table.column[index] = row, column
  return table
