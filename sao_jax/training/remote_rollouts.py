"""The batches of a process that rolls out nothing itself: it only learns, or follows in another one's sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sao_jax.episode import Trajectory
from sao_jax.interrupt import StopSignal
from sao_jax.learner.batches import Batch, agreed_batch
from sao_jax.learner.setup import Learner
from sao_jax.sampler.follower import FollowingService
from sao_jax.training.step_metrics import StepClock, Waits, wait_metrics
from sao_jax.types import PyTree


class RemoteRollouts:
  """Takes the place of `Rollouts`, and of `Experience`, where no share of the data is brought.

  Attributes:
    interrupt: ends the wait for a batch.
    waits: what the trainer waits for; whoever makes it wait counts it there.
    heldout: trajectories of this process to measure the critic by: none.
  """

  heldout: Sequence[Trajectory] = ()

  def __init__(
    self,
    learner: Learner,
    interrupt: StopSignal,
    look: Callable[[], None] = lambda: None,
    service: FollowingService | None = None,
  ):
    """Args:
    learner: agrees on the rows with those that bring them.
    interrupt: ends the wait for a batch.
    look: called now and then while waiting for a batch; may raise.
    service: that of a process that follows; None in one that only learns.
    """
    self.interrupt, self.waits = interrupt, Waits()
    self._learner, self._look, self._clock, self._service = learner, look, StepClock(), service

  def __enter__(self) -> RemoteRollouts:
    return self

  def __exit__(self, *exc: object) -> None:
    pass

  def take(self, version: int) -> Batch | None:
    """Waits for the batch of the next step; None for all processes once one was asked to stop."""
    with self.waits("take"):
      return agreed_batch(self._learner, None if self.interrupt.requested else (), self._look_here)

  def consumed(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Returns the times of a step; the numbers of its trajectories are known where they were rolled out."""
    metrics = self._clock.lap(trajectories)
    return metrics | wait_metrics(self.waits.pop(), metrics["step_seconds"])

  def end_step(self, version: int, params: PyTree | None = None) -> None:
    """Ends the step; `params` are this process's part of new weights for the sampler that it follows in."""
    if self._service is not None and params is not None:
      self._service.publish(params, version)

  def check(self) -> None:
    """Raises what ended the sampler that it follows in; what fails elsewhere is met in the next agreement."""
    if self._service is not None and self._service.error is not None:
      raise self._service.error

  def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (JSON, numpy arrays), which are empty: this process saves no share of the host state."""
    return {}, {}

  def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Goes on without anything of before."""

  def _look_here(self) -> None:
    self._look()
    self.check()
    _ = self.interrupt.requested  # tells the others of a stop that this process was asked for
