"""Packs trajectories into rows of a few fixed shapes, so that nothing recompiles, and shards the rows over the mesh.

Host code on numpy arrays; only `shard_batch` touches devices. Shape letters: B rows, T tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from sao_jax.episode import Trajectory
from sao_jax.errors import ConfigError
from sao_jax.parallel.layout import Layout
from sao_jax.types import TrajectoryBatch

REMEDY = "raise the largest of rollout.row_counts or rollout.row_lengths, or lower rollout.batch_size"


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
) -> TrajectoryBatch:
  """Packs trajectories, longest first, each into the fullest row that still holds it.

  T is the smallest row length that holds the longest trajectory, or a larger one if the rows would be too many; B is
  the smallest row count that suffices. The result depends on the trajectories alone, not on their order.

  Args:
    trajectories: each ends up in one row, every token once and in order.
    row_lengths: choices of T.
    row_counts: choices of B; multiples of `multiple_of`.
    multiple_of: micro-batches times data shards.
    routed_shape: (L, k) packs the routed experts too, -1 for trajectories without any; None leaves them out.
    grouped: numbers the groups of the trajectories, 1, 2, ... in the order of their first rollouts.

  Returns:
    A batch of numpy arrays [B, T].

  Raises:
    ConfigError: when no bucket holds them, or a row count is no multiple.

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

  # Longest first, ties by rollout id: the order in which they come must not matter.
  ordered = sorted(trajectories, key=lambda t: (-len(t), t.rollout_id))
  longest = max((len(t) for t in ordered), default=0)
  lengths = sorted(length for length in row_lengths if length >= longest)
  if not lengths:
    raise ConfigError("rollout.row_lengths", f"a trajectory of {longest} tokens fits no row of {row_lengths}", REMEDY)

  # The shortest rows of which few enough are needed.
  for length in lengths:
    rows = _best_fit([len(t) for t in ordered], length)
    counts = [count for count in row_counts if count >= len(rows)]
    if counts:
      batch = _fill([[ordered[i] for i in row] for row in rows], (min(counts), length), routed_shape)
      return batch.replace(group_ids=_group_ids(batch, ordered, rows)) if grouped else batch

  raise ConfigError(
    "rollout.row_counts",
    f"{len(ordered)} trajectories with {sum(map(len, ordered))} tokens need {len(rows)} rows of {lengths[-1]}, "
    f"the largest bucket has {max(row_counts)}",
    REMEDY,
  )


def unpack(batch: TrajectoryBatch) -> Iterator[dict[str, np.ndarray]]:
  """Yields the fields of every trajectory, [length] each, row by row: the inverse of `pack`, for tests, inspection."""
  fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
  fields = {name: np.asarray(values) for name, values in fields.items() if values is not None}
  for row, trajectory_ids in enumerate(fields["trajectory_ids"]):
    for trajectory in range(1, trajectory_ids.max(initial=0) + 1):
      inside = trajectory_ids == trajectory
      yield {name: values[row][inside] for name, values in fields.items()}


def shard_batch(batch: TrajectoryBatch, layout: Layout) -> TrajectoryBatch:
  """Puts this process's rows on its devices; the result is the global batch, rows over the batch axes of the mesh.

  Args:
    batch: numpy arrays [B / number of processes, T], of the same shape in every process.
    layout: the learner's mesh, and where "batch" and "sequence" live on it.
  """
  sharding = layout.sharding("batch", "sequence")
  return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


def _best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """Returns rows of indices into `lengths` (descending); each joins the row with the least space that suffices."""
  rows: list[list[int]] = []
  space: list[tuple[int, int]] = []  # (tokens left, row), sorted
  for index, length in enumerate(lengths):
    at = bisect.bisect_left(space, (length, -1))
    left, row = space.pop(at) if at < len(space) else (row_length, len(rows))
    if row == len(rows):
      rows.append([])
    rows[row].append(index)
    bisect.insort(space, (left - length, row))
  return rows


def _group_ids(batch: TrajectoryBatch, trajectories: list[Trajectory], rows: list[list[int]]) -> np.ndarray:
  """Returns the number of each token's group, 0 on padding."""
  numbers = {group: number for number, group in enumerate(sorted({t.group for t in trajectories}), start=1)}
  group_ids = np.zeros_like(batch.trajectory_ids)
  for row, members in enumerate(rows):
    of_trajectory = np.array([0, *(numbers[trajectories[i].group] for i in members)], np.int32)
    group_ids[row] = of_trajectory[batch.trajectory_ids[row]]
  return group_ids


def _fill(
  rows: list[list[Trajectory]], shape: tuple[int, int], routed_shape: tuple[int, int] | None
) -> TrajectoryBatch:
  """Lays the trajectories of each row out one behind the other, in arrays of `shape` (B, T)."""
  # All padding: every field as it stands where no token is.
  batch = TrajectoryBatch(
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
  )

  for row, trajectories in enumerate(rows):
    start = segments = 0
    for number, trajectory in enumerate(trajectories, start=1):
      at = (row, slice(start, start + len(trajectory)))

      # Ids: segments are numbered through the row, and positions restart with each of them.
      batch.token_ids[at] = trajectory.token_ids
      begins = trajectory.begins
      batch.segment_ids[at] = segments + np.cumsum(begins, dtype=np.int32)
      batch.trajectory_ids[at] = number
      index = np.arange(len(trajectory), dtype=np.int32)
      batch.positions[at] = index - np.maximum.accumulate(np.where(begins, index, 0))
      segments = batch.segment_ids[row, start + len(trajectory) - 1]

      # Evidence of sampling, token by token.
      batch.action_mask[at] = trajectory.action_mask
      batch.loss_mask[at] = trajectory.trained
      batch.behavior_logprobs[at] = trajectory.behavior_logprobs
      batch.policy_version[at] = trajectory.policy_version
      batch.rewards[at] = trajectory.token_rewards
      batch.truncated[at] = trajectory.status.truncated
      if routed_shape is not None and trajectory.routed_experts is not None:
        batch.routed_experts[at] = trajectory.routed_experts
      start += len(trajectory)
  return batch
