"""Checkpoints of a phase: when one is due, what belongs into it, and one more when the run fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from absl import logging

from sao_jax.checkpoints.checkpointer import Checkpointer, CheckpointFailure
from sao_jax.errors import RunError
from sao_jax.parallel.agreement import ALONE, Processes, ProcessFailed
from sao_jax.report.run_log import RunLog
from sao_jax.training.experience import Experience
from sao_jax.training.phases import CRITIC_PRETRAINED, HELDOUT_VARIANCE, POLICY_ORIGIN, Phase, Start
from sao_jax.training.remote_rollouts import RemoteRollouts
from sao_jax.training.rollouts import Rollouts
from sao_jax.types import TrainState


class Diverged(RunError):
  """Nothing can be updated any more: losses or gradients were not finite in many steps in a row."""


class Saver:
  """Saves train state and rollouts together. As a context manager it saves what was trained when something fails.

  Between `begin_step` and `end_step` nothing can be saved: the old state is donated, and the rollouts still count its
  batch as one to be trained on. A failure there loses the steps since the last checkpoint.

  Steps whose updates are skipped, since something is not finite, end the run when they are too many in a row. As long
  as they last nothing is saved but the end of the phase: the newest checkpoint stays the last good one.
  """

  def __init__(
    self,
    checkpointer: Checkpointer,
    phase: Phase,
    rollouts: Rollouts | Experience | RemoteRollouts,
    log: RunLog,
    start: Start,
    *,
    heldout_variance: Sequence[float] = (),
    processes: Processes = ALONE,
    turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    also: Callable[[int], bool] = lambda step: False,
  ):
    """Args:
    checkpointer: of the phase.
    phase: its steps.
    rollouts: saved with the state.
    log: written out before a save.
    start: what later processes should know of how the phase began.
    heldout_variance: what was measured of the critic, a list that grows.
    processes: those that save together.
    turn: the place of a save among the programs of this process's sampler, see `Checkpointer.save`.
    also: tells of further steps at which a checkpoint is due.
    """
    self._checkpointer, self._phase, self._rollouts, self._log = checkpointer, phase, rollouts, log
    self._start, self._heldout_variance, self._processes = start, heldout_variance, processes
    self._turn, self._also = turn, also
    self._consistent: tuple[int, TrainState] | None = None

  def __enter__(self) -> Saver:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *unused: object) -> None:
    fails = kind is not None and issubclass(kind, Exception)  # a second Ctrl-C ends the program at once
    if not fails or self._consistent is None:
      return
    if isinstance(error, CheckpointFailure) and self._processes.count > 1:
      return  # the others may wait in the save that failed here

    # Said when it is done; what failed first ends the run, not a save that fails as well.
    step, _ = self._consistent
    if not self._others_save(step, error):
      logging.error("Something failed; not all processes can save step %d, so it is not saved.", step)
      return
    try:
      if not self.save():
        return
    except Exception as error:
      logging.error("Something failed, and what was trained up to step %d could not be saved: %r.", step, error)
    else:
      logging.error("Something failed; what was trained is saved: step %d.", step)

  def _others_save(self, step: int, error: BaseException) -> bool:
    """Tells if the other processes save the same step now, as they must: each writes its part."""
    if not isinstance(error, ProcessFailed):
      self._processes.fail(error)  # or they would wait for the next decision
    return self._processes.agree_after_failure(step)

  def begin_step(self) -> None:
    """Marks the state as about to be donated: nothing can be saved any more."""
    self._consistent = None

  def end_step(self, step: int, state: TrainState) -> None:
    """Keeps the state after `step` steps, which belongs together with the rollouts of now."""
    self._consistent = step, state

  def due(self, step: int) -> bool:
    """Tells if a checkpoint follows this step."""
    return self._checkpointer.due(step) or self._also(step)

  def after(self, step: int) -> None:
    """Starts an asynchronous checkpoint if one is due.

    Raises:
      Diverged: too many steps in a row have updated nothing.
    """
    if self.due(step) and not skips(self._log, self._checkpointer):
      self._save()
    stop_if_diverged(self._log, self._checkpointer)

  def save(self, *, ended: bool = False) -> bool:
    """Saves, and waits until it is done. Returns False, and has said so, if it does not: steps are being skipped.

    `ended`: the phase is over, and is saved in any case.
    """
    if skips(self._log, self._checkpointer) and not ended:
      return False
    self._save()
    self._checkpointer.wait()
    return True

  def _save(self) -> None:
    """Starts an asynchronous checkpoint of everything that the next step depends on."""
    step, state = self._consistent
    host_state = {
      "rollouts": list(self._rollouts.state_dict()),
      HELDOUT_VARIANCE: list(self._heldout_variance),
      "policy_version": self._phase.version(step),
      CRITIC_PRETRAINED: self._start.critic_pretrained,
      POLICY_ORIGIN: self._start.policy_origin,
    }
    self._checkpointer.save(step, state, host_state, turn=self._turn)


def skips(log: RunLog, checkpointer: Checkpointer) -> bool:
  """Tells, and says, that nothing is to be saved: the updates of the last steps were not finite."""
  log.flush()
  if log.skipped_in_a_row:
    logging.warning(
      "The updates of the last %d steps were skipped, and these steps are not saved: %s.",
      log.skipped_in_a_row,
      checkpointer.last_good(),
    )
  return log.skipped_in_a_row > 0


def stop_if_diverged(log: RunLog, checkpointer: Checkpointer) -> None:
  """Ends a run whose updates have not been finite for too many steps in a row.

  Raises:
    Diverged: naming the last good checkpoint, which is from before these steps.
  """
  if log.diverged:
    raise Diverged(
      f"the updates of {log.skipped_in_a_row} steps in a row were skipped, since losses, gradients or advantages were "
      f"not finite; {checkpointer.last_good()}. Lower the learning rates, look at rewards and value targets, and run "
      "the same command again: it goes on from there."
    )


def say_interrupted(saved: int | None) -> None:
  """Says where an interrupted phase goes on: after its newest checkpoint, if there is one."""
  if saved is None:
    logging.info("Interrupted before anything was saved; the same command begins again.")
  else:
    logging.info("Interrupted and saved after step %d; the same command goes on from there.", saved)
