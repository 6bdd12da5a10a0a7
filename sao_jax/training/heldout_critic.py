"""The critic measured on rollouts that it does not train on: explained variance, now and then in value pretraining."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from sao_jax.algorithm.advantage import value_targets
from sao_jax.algorithm.network import map_micro_batches
from sao_jax.algorithm.tokens import token_values, trained_tokens
from sao_jax.algorithm.value_loss import make_value_head
from sao_jax.episode import Trajectory
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.setup import Learner, micro_batches, share_of_batch
from sao_jax.parallel.feeding import everywhere
from sao_jax.report.run_log import RunLog
from sao_jax.training.phases import HELDOUT_VARIANCE
from sao_jax.types import PyTree, TrainState, TrajectoryBatch


class HeldoutCritic:
  """Measures the explained variance of held-out trajectories every so many steps, and writes it to the metrics.

  Attributes:
    variances: all that was measured since the phase began; NaN where all returns were equal.
  """

  def __init__(
    self,
    learner: Learner,
    log: RunLog,
    trajectories: Sequence[Trajectory],
    *,
    every: int,
    known: Sequence[float],
  ):
    """Args:
    learner: has the critic.
    log: gets the figures.
    trajectories: those held out; more may be appended to it. Nothing is measured while there are none.
    every: steps between two measurements.
    known: what was measured before.
    """
    self.variances = list(known)
    self._learner, self._log, self._trajectories, self._every = learner, log, trajectories, every
    self._read = make_reader(learner)

  def after(self, step: int, state: TrainState) -> None:
    """Measures the critic of a state if that is due, and waits for it."""
    if step % self._every:
      return
    count = sum(self._learner.processes.gather("held-out trajectories", len(self._trajectories)))
    if not count:
      return
    with self._learner.processes.busy():  # it compiles, the first time
      params = self._learner.critic.whole(state.critic.params, state.policy.params)
      variance = heldout_variance(self._learner, self._read, params, self._trajectories)
    self.variances.append(variance)
    self._log.write(step, {HELDOUT_VARIANCE: variance, "heldout_trajectories": count})
    self._log.note(heldout_ev=variance)


Reader = Callable[[PyTree, TrajectoryBatch], tuple[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]]]


def make_reader(learner: Learner) -> Reader:
  """Returns the jitted `(critic parameters, rows) -> (values, targets, mask)`, all of them token-aligned.

  In micro-batches like a train step, so that it needs no more memory for activations.
  """
  algorithm, critic, head = learner.config.algorithm, learner.critic, make_value_head(learner.config.algorithm)

  def read(params: PyTree, rows: TrajectoryBatch) -> tuple[Array, Array, Array]:
    parts = micro_batches(learner, rows.token_ids.shape[0])
    values = map_micro_batches(lambda part: head.values(critic.apply(params, part)), rows, parts)
    counted = trained_tokens(rows.replace(loss_mask=rows.action_mask), algorithm.truncation)  # held out, not over age
    return token_values(values, rows), value_targets(algorithm, rows, values), counted

  return jax.jit(read)


def heldout_variance(learner: Learner, read: Reader, params: PyTree, trajectories: Sequence[Trajectory]) -> float:
  """1 - Var(R - V) / Var(R) over the sampled tokens of trajectories, a batch at a time; NaN without variance.

  Processes that only sample bring their trajectories, and get the result.
  """
  processes, apart = learner.processes, learner.devices.apart
  size, errors, returns = share_of_batch(learner.config, learner.share.count).batch_size, [], []
  replicated = learner.layout.sharding() if processes.count > 1 else None
  for start in range(0, processes.max("held-out trajectories of one process", len(trajectories)), size):
    rows = packed_batch(learner, trajectories[start : start + size]).rows
    if not learner.learns:
      continue
    values, targets, mask = everywhere(read(params, rows), replicated)
    errors.append((targets - values)[mask])
    returns.append(targets[mask])

  variance = _explained(np.concatenate(errors), np.concatenate(returns)) if learner.learns else None
  return processes.first("the critic's explained variance", variance) if apart else variance


def _explained(errors: np.ndarray, returns: np.ndarray) -> float:
  spread = np.var(returns, dtype=np.float64)
  return float(1.0 - np.var(errors, dtype=np.float64) / spread) if spread > 0.0 else float("nan")
