"""The batches of value pretraining: demonstrations, then rollouts of the frozen policy, each of them several times.

The policy never changes, so its rollouts never grow stale: every fresh batch is followed by steps on a bounded store of
the newest ones. The rollouts of some prompts are held out, to measure the critic by.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from sao_jax.config import RunConfig, ValuePretrainingConfig
from sao_jax.episode import BadPrompt, PromptKey, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.interrupt import StopSignal
from sao_jax.learner.batches import Batch, agreed_batch
from sao_jax.learner.setup import Learner, share_of_batch
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state
from sao_jax.training import phases
from sao_jax.training.demonstrations import Demonstrations
from sao_jax.training.rollouts import Rollouts
from sao_jax.training.step_metrics import Waits
from sao_jax.types import PyTree

FEW_PROMPTS = 1000  # of which every single one is looked at
DRAWS = 0x57_0E  # stream of the random numbers that draw from the store


def is_heldout(key: PromptKey, fraction: float) -> bool:
  """Tells if a prompt is held out of value pretraining: by a hash of its name, in whatever epoch, run and process."""
  digest = hashlib.sha256(f"{key.environment} {key.id}".encode()).digest()
  return int.from_bytes(digest[:8], "big") < fraction * 2**64


class Store:
  """The newest trajectories of prompts that are trained on, and the first ones of those that are held out.

  What is held out stays, since measurements of one set can be compared. The experts that the sampler recorded are left
  out: they take many times the bytes of the tokens, and the critic has routers of its own.
  """

  def __init__(self, size: int, heldout_fraction: float):
    """Args:
    size: trajectories in all.
    heldout_fraction: of the prompts, and so of the size.
    """
    self._fraction = heldout_fraction
    self.heldout: list[Trajectory] = []
    self._most_heldout = round(size * heldout_fraction)
    self._trained: collections.deque[Trajectory] = collections.deque(maxlen=max(size - self._most_heldout, 1))

  def __len__(self) -> int:
    """Trajectories to train on."""
    return len(self._trained)

  def add(self, trajectories: Sequence[Trajectory]) -> None:
    """Keeps trajectories, each on the side of its prompt."""
    for trajectory in (dataclasses.replace(each, routed_experts=None) for each in trajectories):
      if not is_heldout(trajectory.key, self._fraction):
        self._trained.append(trajectory)
      elif len(self.heldout) < self._most_heldout:
        self.heldout.append(trajectory)

  def draw(self, count: int, rng: np.random.Generator) -> list[Trajectory]:
    """Draws `count` different trajectories to train on, or all of them if there are fewer."""
    chosen = rng.choice(len(self), size=min(count, len(self)), replace=False)
    return [self._trained[index] for index in chosen.tolist()]

  def state_dict(self) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Returns (JSON, numpy arrays): all trajectories, in order."""
    return trajectories_to_state([*self.heldout, *self._trained])

  def load_state_dict(self, records: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> None:
    """Replaces everything by a saved state; a smaller store keeps the newest."""
    self.heldout.clear()
    self._trained.clear()
    self.add(trajectories_from_state(records, arrays))


class Experience:
  """Takes the place of `Rollouts` in value pretraining, and gives every step its batch.

  * The first `demonstration_steps` steps get demonstrations. Rollouts go on meanwhile, as far as admission lets them.
  * Of every `passes` steps behind them, the first gets a fresh batch, and the others draw from the store.

  Which one it is, and what is drawn, depends on the step and the seed alone; the store is part of the saved state. So a
  resumed run goes on as if it had not stopped.

  Attributes:
    store: the rollouts of all steps done.
  """

  def __init__(
    self,
    rollouts: Rollouts,
    learner: Learner,
    *,
    demonstrations: Demonstrations | None = None,
    first_step: int = 0,
  ):
    """Args:
    rollouts: of the frozen policy, not started.
    learner: packs batches, and holds the run's configuration.
    demonstrations: for the first course; None where there is none.
    first_step: train steps done before.
    """
    self._rollouts, self._learner, self._demonstrations = rollouts, learner, demonstrations
    self._settings: ValuePretrainingConfig = learner.config.value_pretraining
    self._size = share_of_batch(learner.config, learner.share.count).batch_size
    self.store = Store(self._settings.store_trajectories // learner.share.count, self._settings.heldout_fraction)
    self._step = first_step
    self._fresh: list[Trajectory] = []  # of the batch in training
    self._shown = None if demonstrations is None else demonstrations.prompts.get_state()

  @property
  def interrupt(self) -> StopSignal:
    """Ends the wait for a batch."""
    return self._rollouts.interrupt

  @property
  def heldout(self) -> Sequence[Trajectory]:
    """The rollouts that are not trained on; they grow in number."""
    return self.store.heldout

  @property
  def waits(self) -> Waits:
    """The trainer's waits, by their names."""
    return self._rollouts.waits

  def __enter__(self) -> Experience:
    self._rollouts.__enter__()
    return self

  def __exit__(self, *exception: object) -> None:
    self._rollouts.__exit__(*exception)

  def take(self, version: int) -> Batch | None:
    """Returns the batch of the next step; None once an interruption was requested while waiting for it."""
    self._rollouts.check()
    if self.interrupt.requested:
      return self._agreed(None)
    after = self._step - self._settings.demonstration_steps
    if after < 0:
      demonstrations = [_as_of(version, trajectory) for trajectory in self._demonstrations.batch(self._size)]
      return self._agreed(demonstrations)

    # A fresh batch, which waits for rollouts, or one of the passes over those of before.
    if after % self._settings.passes == 0 or not len(self.store):
      batch = self._rollouts.take(version)
      self._fresh = [] if batch is None else batch.trajectories
      return batch
    rng = np.random.default_rng([DRAWS, self._learner.config.training.seed, self._step])
    return self._agreed(self.store.draw(self._size, rng))

  def _agreed(self, trajectories: Sequence[Trajectory] | None) -> Batch | None:
    return agreed_batch(self._learner, trajectories, self._rollouts.look)

  def consumed(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """See `Rollouts.consumed`; says how many of the trajectories are demonstrations."""
    shown = len(trajectories) if self._step < self._settings.demonstration_steps else 0
    return self._rollouts.consumed(trajectories) | {"num_demonstrations": shown}

  def end_step(self, version: int, params: PyTree | None = None) -> None:
    """Ends the step of the batch that was taken last; a fresh one goes into the store."""
    self._rollouts.end_step(version, params)
    self.store.add(self._fresh)
    self._step, self._fresh = self._step + 1, []
    if self._demonstrations is not None:
      self._shown = self._demonstrations.prompts.get_state()

  def check(self) -> None:
    """Raises the exception that stopped the rollout side, as itself."""
    self._rollouts.check()

  def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (JSON, numpy arrays) of rollouts, store and position in the demonstrations, as of the last step done."""
    state, arrays = self._rollouts.state_dict()
    records, stored = self.store.state_dict()
    return (
      {"rollouts": state, "store": records, "demonstrations": self._shown},
      {"rollouts": arrays, "store": stored},
    )

  def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Goes on from a saved state, before the context begins; one of 0.1.0 has rollouts alone, and fills a new store."""
    if "store" not in state:
      self._rollouts.load_state_dict(state, arrays)
      return
    self._rollouts.load_state_dict(state["rollouts"], arrays["rollouts"])
    self.store.load_state_dict(state["store"], arrays["store"])
    self._shown = state["demonstrations"]
    if self._demonstrations is not None and self._shown is not None:
      self._demonstrations.prompts.set_state(self._shown)


def _as_of(version: int, demonstration: Trajectory) -> Trajectory:
  """Gives a demonstration the version of the step, so that metrics show no lag that there is not."""
  versions = np.where(demonstration.action_mask, version, demonstration.policy_version).astype(np.int32)
  return dataclasses.replace(demonstration, policy_version=versions)


def make_experience(learner: Learner, make_rollouts: Callable[..., Rollouts], first_step: int) -> Experience:
  """Makes the experience of value pretraining in this process, not started.

  Args:
    learner: packs batches, and holds the run's configuration.
    make_rollouts: takes `is_heldout` and makes the rollouts.
    first_step: train steps done before.

  Raises:
    ConfigError: there are no demonstrations, or no prompts to train on.
  """
  config = learner.config
  settings = config.value_pretraining
  heldout = functools.partial(is_heldout, fraction=settings.heldout_fraction)
  _check_prompts(config, heldout)
  demonstrations = None
  if settings.demonstration_steps:
    demonstrations = Demonstrations(config, phases.VALUE_PRETRAINING, leave_out=heldout, share=learner.share)
  rollouts = make_rollouts(is_heldout=heldout)
  return Experience(rollouts, learner, demonstrations=demonstrations, first_step=first_step)


def _check_prompts(config: RunConfig, heldout: Callable[[PromptKey], bool]) -> None:
  """Refuses so few prompts that the hash of their names leaves none to train on, and tells when it holds none out."""
  prompts = config.environment.prompts(config.environment.tokenizer(), "train", config.training.seed)
  if len(prompts) > FEW_PROMPTS:
    return
  keys, fraction = [], config.value_pretraining.heldout_fraction
  for index in range(len(prompts)):
    with contextlib.suppress(BadPrompt):  # a damaged one, which is skipped when its turn comes
      keys.append(prompts[index].key)
  count = sum(map(heldout, keys))
  if keys and count == len(keys):
    raise ConfigError(
      "value_pretraining.heldout_fraction",
      f"{fraction} of the prompts are held out, which are all of these {count}.",
      "Set it to 0, or train on more prompts.",
    )
  if fraction and not count:
    logging.warning(
      "value_pretraining.heldout_fraction=%g holds out none of these %d prompts, so nothing tells when explained "
      "variance has plateaued: there will be %d steps.",
      fraction,
      len(keys),
      config.value_pretraining.max_steps,
    )
