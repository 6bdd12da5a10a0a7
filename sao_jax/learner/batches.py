"""Packed batches on the learner's mesh, and the few shapes that they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sao_jax.config import RunConfig
from sao_jax.episode import Trajectory
from sao_jax.learner.packing import check_row_counts, in_order, lay_out, pack, shard_batch, sharding_of
from sao_jax.learner.row_plan import RowPlan, plan_rows
from sao_jax.learner.setup import Learner, rows_multiple
from sao_jax.parallel.feeding import share_of_rows
from sao_jax.rollout.evidence import RequiredExperts
from sao_jax.types import TrajectoryBatch


class Batch(NamedTuple):
  """The input of a train step, and the trajectories that it was made of.

  Attributes:
    trajectories: those of this process, in the order given.
    rows: the packed rows of all processes, sharded over the mesh; abstract in a process that does not learn.
  """

  trajectories: list[Trajectory]
  rows: TrajectoryBatch


def packed_batch(learner: Learner, trajectories: Sequence[Trajectory]) -> Batch:
  """Packs the trajectories of all processes into the configured row buckets and shards them over the learner's mesh.

  Any number of tokens fits, see `row_plan.plan_rows`. All processes call it together, and use one bucket: the largest
  that any of them needs.

  Args:
    learner: packs batches, and holds the run's configuration.
    trajectories: those of this process.

  Raises:
    ConfigError: a context fits no row.
  """
  return agreed_batch(learner, trajectories)


def agreed_batch(
  learner: Learner, trajectories: Sequence[Trajectory] | None, look: Callable[[], object] = lambda: None
) -> Batch | None:
  """Like `packed_batch`; None for all processes if one of them has no trajectories, since it was asked to stop.

  Args:
    learner: packs batches, and holds the run's configuration.
    trajectories: those of this process; () in one that only learns, None in one that was asked to stop.
    look: called now and then while others are waited for; may raise.
  """
  rows = _packed_rows(learner, trajectories, look)
  if rows is None:
    return None
  return Batch(list(trajectories), shard_batch(rows, learner.layout, learner.devices.sources))


def required_experts(config: RunConfig) -> RequiredExperts | None:
  """Returns the experts that every trajectory must bring along, or None without `algorithm.router_replay`."""
  if not config.algorithm.router_replay:
    return None
  return RequiredExperts(*config.model.routed_shape, config.model.num_experts)


def abstract_rows(learner: Learner) -> Iterator[TrajectoryBatch]:
  """Yields shapes, dtypes and shardings of the batches that a run surely needs: each row length with each row count.

  Batches with pieces, and those with more rows, are rare or never come.
  """
  rollout = learner.config.rollout
  for length in sorted(set(rollout.row_lengths)):
    for count in sorted(set(rollout.row_counts)):
      yield jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding_of(rows, learner.layout)),
        _packed_alone(learner, [], (length,), (count,)),
      )


def _packed_rows(
  learner: Learner, trajectories: Sequence[Trajectory] | None, look: Callable[[], object] = lambda: None
) -> TrajectoryBatch | None:
  """Returns the rows of this process, in the shape that all agree on; None if one of them has no trajectories.

  A process that brings none has rows of padding.
  """
  rollout, processes, own = learner.config.rollout, learner.processes, learner.share
  if processes.count == 1:
    alone = learner, trajectories, rollout.row_lengths, rollout.row_counts
    return None if trajectories is None else _packed_alone(*alone)
  check_row_counts(rollout.row_counts, rows_multiple(learner))
  counts = [count // own.count for count in rollout.row_counts]

  # The longest rows that any process needs, then the most rows: shorter ones are planned anew for the others.
  ordered = in_order(trajectories or ())
  plan = plan_rows(ordered, rollout.row_lengths, counts)
  needs = lambda plan: [*plan.shape, plan.cuts] if own.brings else []
  answers = processes.gather("the rows of a batch", None if trajectories is None else needs(plan), look)
  if None in answers:
    return None
  wanted = list(filter(None, answers))
  length = max(length for _, length, _ in wanted)
  if any(each != length for _, each, _ in wanted):
    plan = plan_rows(ordered, (length,), counts)
    wanted = list(filter(None, processes.gather("the number of rows", needs(plan))))

  # One shape for all, with a table of pieces if anybody has some.
  shape = (max(count for count, _, _ in wanted), length)
  rows = _laid_out(learner, ordered, RowPlan(shape, plan.rows), pieces=any(cuts for _, _, cuts in wanted))
  if not own.brings:
    return rows

  # Rows that stay where they were made are the share of the batch that lies there; others come in order.
  whole = (shape[0] * own.count, length)
  share = None
  if not learner.devices.apart:
    share = share_of_rows(sharding_of(np.empty(whole, np.bool_), learner.layout), whole, processes.index)
  return _numbered_globally(rows, own.index if share is None else share, rollout.batch_size)


def _packed_alone(
  learner: Learner, trajectories: Sequence[Trajectory], row_lengths: Sequence[int], row_counts: Sequence[int]
) -> TrajectoryBatch:
  """Returns the rows of a process that has nobody to agree with."""
  config = learner.config
  routed_shape = config.model.routed_shape if config.algorithm.router_replay else None
  return pack(trajectories, row_lengths, row_counts, rows_multiple(learner), routed_shape, **_optional_fields(config))


def _laid_out(
  learner: Learner, trajectories: list[Trajectory], plan: RowPlan, *, pieces: bool = False
) -> TrajectoryBatch:
  config = learner.config
  routed_shape = config.model.routed_shape if config.algorithm.router_replay else None
  return lay_out(trajectories, plan, routed_shape, pieces=pieces, **_optional_fields(config))


def _optional_fields(config: RunConfig) -> dict[str, bool]:
  """Fields of a batch that some estimators of advantages want."""
  return {"grouped": config.rollout.group_size > 1, "baselines": config.algorithm.needs_baselines}


def _numbered_globally(rows: TrajectoryBatch, share: int, batch_size: int) -> TrajectoryBatch:
  """Returns the rows with groups, pieces and rows numbered through all processes: none must meet another's number.

  `share` is the number of the share of the global rows that these become.
  """
  shifted = lambda ids, by: np.where(ids > 0, ids + by, 0).astype(np.int32)
  if rows.group_ids is not None:
    rows = rows.replace(group_ids=shifted(rows.group_ids, share * batch_size))

  # The tables of all processes stand one behind the other, and the end of each is never used.
  pieces = rows.pieces
  if pieces is not None:
    ids = shifted(pieces.ids, share * len(pieces.trajectory))
    rows = rows.replace(pieces=pieces.replace(ids=ids, row=pieces.row + np.int32(share * len(pieces.ids))))
  return rows
