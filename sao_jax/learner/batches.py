"""Packed batches on the learner's mesh, and the few shapes that they come in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sao_jax.config import RunConfig
from sao_jax.episode import Trajectory
from sao_jax.learner.packing import pack, shard_batch, sharding_of
from sao_jax.learner.setup import Learner, rows_multiple
from sao_jax.parallel.process import data_process_count, data_process_index
from sao_jax.rollout.evidence import RequiredExperts
from sao_jax.types import TrajectoryBatch


class Batch(NamedTuple):
  """The input of a train step, and the trajectories that it was made of.

  Attributes:
    trajectories: those of this process, in the order given.
    rows: the packed rows of all processes, sharded over the mesh.
  """

  trajectories: list[Trajectory]
  rows: TrajectoryBatch


def packed_batch(learner: Learner, trajectories: Sequence[Trajectory]) -> Batch:
  """Packs this process's trajectories into the configured row buckets and shards them over the learner's mesh.

  Any number of tokens fits, see `row_plan.plan_rows`.

  Raises:
    ConfigError: a context fits no row.
  """
  rollout = learner.config.rollout
  rows = _packed_rows(learner, trajectories, rollout.row_lengths, rollout.row_counts)
  return Batch(list(trajectories), shard_batch(rows, learner.layout))


def required_experts(config: RunConfig) -> RequiredExperts | None:
  """Returns the experts that every trajectory must bring along, or None without `algorithm.router_replay`."""
  if not config.algorithm.router_replay:
    return None
  return RequiredExperts(*config.model.routed_shape, config.model.num_experts)


def abstract_rows(learner: Learner) -> Iterator[TrajectoryBatch]:
  """Yields shapes, dtypes and shardings of the batches that a run surely needs: each row length with each row count.

  Batches with pieces, and those with more rows, are rare or never come.
  """
  rollout, processes = learner.config.rollout, data_process_count()
  for length in sorted(set(rollout.row_lengths)):
    for count in sorted(set(rollout.row_counts)):
      yield jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct(
          (rows.shape[0] * processes, *rows.shape[1:]), rows.dtype, sharding=sharding_of(rows, learner.layout)
        ),
        _packed_rows(learner, [], (length,), (count,)),
      )


def _packed_rows(
  learner: Learner, trajectories: Sequence[Trajectory], row_lengths: Sequence[int], row_counts: Sequence[int]
) -> TrajectoryBatch:
  config = learner.config
  routed_shape = config.model.routed_shape if config.algorithm.router_replay else None
  rows = pack(
    trajectories, row_lengths, row_counts, rows_multiple(learner), routed_shape, grouped=config.rollout.group_size > 1
  )
  return _numbered_globally(rows, data_process_index(), config.rollout.batch_size)


def _numbered_globally(rows: TrajectoryBatch, process: int, batch_size: int) -> TrajectoryBatch:
  """Returns the rows with groups, pieces and rows numbered through all processes: none must meet another's number."""
  shifted = lambda ids, by: np.where(ids > 0, ids + by, 0).astype(np.int32)
  if rows.group_ids is not None:
    rows = rows.replace(group_ids=shifted(rows.group_ids, process * batch_size))

  # The tables of all processes stand one behind the other, and the end of each is never used.
  pieces = rows.pieces
  if pieces is not None:
    ids = shifted(pieces.ids, process * len(pieces.trajectory))
    rows = rows.replace(pieces=pieces.replace(ids=ids, row=pieces.row + np.int32(process * len(pieces.ids))))
  return rows
