"""Replay of a finished run: trains on the recorded batches in the recorded order, without any sampling.

Nothing is asynchronous here, so a run whose parameters come out again depended on what it consumed and on nothing else.
"""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np

from sao_jax.checkpoints.checkpointer import Checkpointer, load_host_state
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import expand
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.compilation import CompiledSteps
from sao_jax.learner.setup import abstract_state, make_learner
from sao_jax.parallel.params import path_name
from sao_jax.report.progress import Progress
from sao_jax.training import phases
from sao_jax.training.consumed import Record
from sao_jax.types import TrainState


@dataclasses.dataclass(frozen=True)
class Replay:
  """Comparison of a replayed state with the saved one.

  Attributes:
    steps: train steps that were replayed.
    leaves: arrays compared: parameters, optimiser states and counters of both networks.
    differing: names of the arrays that are not equal bit for bit.
    largest_difference: largest absolute difference between two numbers of the states.
  """

  steps: int
  leaves: int
  differing: tuple[str, ...]
  largest_difference: float

  @property
  def identical(self) -> bool:
    """True if the run came out again bit for bit."""
    return not self.differing


def replay(config: RunConfig, workdir: str | os.PathLike, *, validated: bool = False) -> Replay:
  """Trains on what the run in `workdir` consumed, from the same start, and compares with its newest checkpoint.

  `validated`: the caller has called `validate`.

  Raises:
    ConfigError: there is no finished step, or a step was not recorded, or there are several processes.
  """
  if not validated:
    validate(config, training=True)
  if jax.process_count() > 1:
    raise ConfigError(
      "processes", f"there are {jax.process_count()} of them.", "Replay in one process with all devices."
    )

  # Every step from the first one on must have been recorded.
  workdir = expand(workdir)
  phase, record = phases.reinforcement_learning(config), Record(workdir, phases.TRAIN)
  learner = make_learner(config)
  steps = phases.latest_step(workdir / phase.name)
  if not steps:
    raise ConfigError("workdir", f"{workdir} holds no trained step", "run launch.train there first")
  missing = record.missing(steps)
  if missing:
    raise ConfigError(
      "rollout.record",
      f"{len(missing)} of the {steps} steps of {workdir} were not recorded, the first is step {missing[0]}",
      "train with --config.rollout.record=True (or rollout.deterministic=True) from the first step on",
    )

  # The same start, objective and batches, in order.
  began_pretrained = phases.began_pretrained(load_host_state(workdir / phase.name, steps))
  learner = phases.settle_objective(learner, critic_pretrained=began_pretrained)
  state = phases.initial_state(config, learner, workdir, phase)
  kinds = {phase.updates_policy(step) for step in range(steps)}
  with Progress("replay", total=steps) as progress, CompiledSteps(learner, kinds) as train_step:
    for step in range(steps):
      rows = packed_batch(learner, record.read(step + 1)).rows
      state, _ = train_step(state, rows, update_policy=phase.updates_policy(step))
      progress.update(step + 1)

  # The saved state is read only now: two states need twice the memory.
  with Checkpointer(workdir / phase.name) as checkpointer:
    return compare(steps, state, checkpointer.restore(abstract_state(learner), step=steps).state)


def compare(steps: int, replayed: TrainState, saved: TrainState) -> Replay:
  """Compares all leaves of two states bit for bit."""
  ours, theirs = (jax.tree_util.tree_leaves_with_path(jax.device_get(state)) for state in (replayed, saved))
  differing, largest = [], 0.0
  for (path, a), (_, b) in zip(ours, theirs, strict=True):
    if np.asarray(a).tobytes() != np.asarray(b).tobytes():
      differing.append(path_name(path))
      difference = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
      largest = max(largest, float(difference.max(initial=0.0)))
  return Replay(steps, len(ours), tuple(differing), largest)
