"""Packed batches on the learner's mesh, and the few shapes that they come in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from sao_jax.config import RunConfig
from sao_jax.episode import Trajectory
from sao_jax.learner.packing import pack, shard_batch
from sao_jax.learner.setup import Learner, rows_multiple
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.process import data_process_count
from sao_jax.rollout.evidence import Routing
from sao_jax.types import TrajectoryBatch


class Batch(NamedTuple):
  """What a train step takes, and what it was made of.

  Attributes:
    trajectories: of this process.
    rows: the packed rows of all processes, sharded over the mesh.
  """

  trajectories: list[Trajectory]
  rows: TrajectoryBatch


def packed_batch(learner: Learner, trajectories: Sequence[Trajectory]) -> Batch:
  """Packs this process's trajectories into the configured row buckets and shards them over the learner's mesh.

  Raises:
    ConfigError: no bucket holds them.
  """
  rollout = learner.config.rollout
  rows = _packed_rows(learner, trajectories, rollout.row_lengths, rollout.row_counts)
  return Batch(list(trajectories), shard_batch(rows, learner.mesh))


def replayed_routing(config: RunConfig) -> Routing | None:
  """Which experts trajectories bring along for the policy to use; None: none (`algorithm.router_replay`)."""
  if not config.algorithm.router_replay:
    return None
  return Routing(*config.model.routed_shape, config.model.num_experts)


def abstract_rows(learner: Learner) -> Iterator[TrajectoryBatch]:
  """Shapes, dtypes and shardings of every batch that `packed_batch` can make: each row length with each row count."""
  rollout = learner.config.rollout
  sharding = Layout(learner.mesh).sharding("batch", "sequence")
  processes = data_process_count()
  for length in sorted(set(rollout.row_lengths)):
    for count in sorted(set(rollout.row_counts)):
      yield jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct((rows.shape[0] * processes, *rows.shape[1:]), rows.dtype, sharding=sharding),
        _packed_rows(learner, [], (length,), (count,)),
      )


def _packed_rows(
  learner: Learner, trajectories: Sequence[Trajectory], row_lengths: Sequence[int], row_counts: Sequence[int]
) -> TrajectoryBatch:
  replayed = learner.config.model.routed_shape if learner.config.algorithm.router_replay else None
  return pack(trajectories, row_lengths, row_counts, rows_multiple(learner), replayed)
