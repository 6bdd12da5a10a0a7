"""Checkpoints of a phase: when one is due, what belongs into it, and one more when the run fails."""

from __future__ import annotations

from absl import logging

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.report.run_log import RunLog
from sao_jax.training.phases import CRITIC_PRETRAINED, EXPLAINED_VARIANCE, POLICY_ORIGIN, Phase, Start
from sao_jax.training.rollouts import Rollouts
from sao_jax.types import TrainState


class Saver:
  """Saves train state and rollouts together. As a context manager it saves what was trained when something fails.

  Between `begin_step` and `end_step` nothing can be saved: the old state is donated, and the rollouts still count its
  batch as one to be trained on. A failure there loses the steps since the last checkpoint.
  """

  def __init__(self, checkpointer: Checkpointer, phase: Phase, rollouts: Rollouts, log: RunLog, start: Start):
    self._checkpointer, self._phase, self._rollouts, self._log = checkpointer, phase, rollouts, log
    self._start = start  # what later processes should know of how the phase began
    self._consistent: tuple[int, TrainState] | None = None

  def __enter__(self) -> Saver:
    return self

  def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
    fails = kind is not None and issubclass(kind, Exception)  # a second Ctrl-C ends the program at once
    if not fails or self._consistent is None:
      return

    # Said when it is done; what failed first ends the run, not a save that fails as well.
    step, _ = self._consistent
    try:
      self.save()
    except Exception as error:
      logging.error("Something failed, and what was trained up to step %d could not be saved: %r.", step, error)
    else:
      logging.error("Something failed; what was trained is saved: step %d.", step)

  def begin_step(self) -> None:
    """Marks the state as about to be donated: nothing can be saved any more."""
    self._consistent = None

  def end_step(self, step: int, state: TrainState) -> None:
    """Keeps the state after `step` steps, which belongs together with the rollouts of now."""
    self._consistent = step, state

  def due(self, step: int) -> bool:
    """Tells if a checkpoint follows this step."""
    return self._checkpointer.due(step)

  def after(self, step: int) -> None:
    """Starts an asynchronous checkpoint if one is due."""
    if self.due(step):
      self._save()

  def save(self) -> None:
    """Saves, and waits until it is done."""
    self._save()
    self._checkpointer.wait()

  def _save(self) -> None:
    """Starts an asynchronous checkpoint of everything that the next step depends on."""
    step, state = self._consistent
    self._log.flush()
    host_state = {
      "rollouts": list(self._rollouts.state_dict()),
      "explained_variance": self._log.history[EXPLAINED_VARIANCE],
      "policy_version": self._phase.version(step),
      CRITIC_PRETRAINED: self._start.critic_pretrained,
      POLICY_ORIGIN: self._start.policy_origin,
    }
    self._checkpointer.save(step, state, host_state)
