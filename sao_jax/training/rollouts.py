"""The rollout side of a run, as the training loop uses it: take a batch, end the step; with its numbers per step."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

# Not where it is used: while it is imported, etils replaces `__import__` for all threads, and a train step that another
# thread traces meanwhile would get modules that are none.
import grain  # noqa: F401
import numpy as np

from sao_jax.config import RolloutConfig, RunConfig
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import PromptKey, Trajectory
from sao_jax.interrupt import POLL, StopSignal
from sao_jax.learner.batches import agreed_batch, required_experts
from sao_jax.learner.setup import Learner, share_of_batch
from sao_jax.parallel.process import DataShare
from sao_jax.rollout.buffer import TrajectoryBuffer
from sao_jax.rollout.difficulty import DifficultyFilter
from sao_jax.rollout.ledger import Ledger
from sao_jax.rollout.prompt_stream import PromptStream
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.rollout.running_mean import RunningMeans
from sao_jax.sampler.service import SamplerService
from sao_jax.training.consumed import Record
from sao_jax.training.expectation import Expectation
from sao_jax.training.phases import TRAIN, VALUE_PRETRAINING, prompt_seed
from sao_jax.training.step_metrics import StepMetrics, Waits
from sao_jax.types import PyTree


class Rollouts:
  """Rollouts from the trainer's side; a context manager that starts and stops their loop.

  Example:
    with make_rollouts(learner, service, workdir, phase.name, step, version, interrupt) as rollouts:
      while (batch := rollouts.take(version)) is not None:
        state, metrics = train_step(state, batch.rows)
        metrics |= rollouts.consumed(batch.trajectories)
        version += 1
        rollouts.end_step(version, jax.block_until_ready(publish(state.policy.params)))

  Between `take` and `end_step` a batch is in training. A state saved in between has it as buffered, so
  it belongs with the parameters of before the step; a state saved at any other time belongs with the newest ones.

  Attributes:
    loop: the asynchronous loop.
    interrupt: ends the wait for a batch.
    waits: what the trainer waits for; whoever makes it wait counts it there.
    heldout: trajectories that are kept to measure the critic by: none.
  """

  heldout: Sequence[Trajectory] = ()

  def __init__(
    self,
    loop: RolloutLoop,
    batch_size: int,
    interrupt: StopSignal,
    *,
    service: SamplerService | None = None,
    record: Record | None = None,
    first_step: int = 0,
    deterministic: bool = False,
    look: Callable[[], None] = lambda: None,
    expectation: Expectation | None = None,
    agree: Callable[[list[Trajectory] | None, Callable[[], None]], Any] = lambda trajectories, look: trajectories,
  ):
    """Args:
    loop: the asynchronous loop, not started yet.
    batch_size: trajectories per train step.
    interrupt: ends the wait for a batch.
    service: the sampler that new weights are published to; None where nothing is published.
    record: keeps the batch of every step, for a later replay; None keeps nothing.
    first_step: train steps done before.
    deterministic: end, before a new version, what was begun under the old one.
    look: called now and then while waiting for a batch; may raise.
    expectation: of what the bounds on staleness do to the data; None expects nothing.
    agree: makes of the trajectories that the buffer hands out, or of None, what `take` returns; in training the batch
      of all processes, or None for all if one of them was asked to stop. It calls `look` while it waits for others.
    """
    self.loop, self.interrupt, self.waits = loop, interrupt, Waits()
    self._batch_size, self._service, self._deterministic, self._look = batch_size, service, deterministic, look
    self._record, self._step, self._expectation, self._agree = record, first_step, expectation, agree
    self._metrics: StepMetrics | None = None

  def __enter__(self) -> Rollouts:
    self.loop.start()
    stats = self._service.stats if self._service is not None else dict
    self._metrics = StepMetrics(self.loop, self.waits, stats)
    if self._expectation is not None:  # a resumed run knows its episodes
      self._expectation.look(self.loop)
    return self

  def __exit__(self, *exc: object) -> None:
    self.loop.stop()

  def take(self, version: int) -> Any:
    """Waits for the batch of the step that updates `version`.

    Returns:
      What `agree` makes of the buffer's trajectories, in training a `Batch`; None once an interruption was requested.

    Raises:
      BaseException: what stopped the rollout side, or `look` raised, as itself.
    """
    while not self.interrupt.requested:
      self._look()
      self.check()
      try:
        with self.waits("take"):
          trajectories = self.loop.buffer.take(self._batch_size, version, timeout=POLL)
      except TimeoutError:
        self.check()  # a TimeoutError of the rollout side itself is not ours to swallow
        continue

      with self.waits("take"):
        return self._agree(trajectories, self.look)
    return self._agree(None, self.look)

  def consumed(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Takes note of what a step consumes; call it once per step, while the device computes it.

    The trajectories are kept for a later replay, if that is wanted.

    Returns:
      Host-side numbers of the step, for its metrics.
    """
    self._step += 1
    if self._record is not None:
      self._record.write(self._step, trajectories)
    metrics = self._metrics.read(trajectories)
    if self._expectation is not None:
      self._expectation.look(self.loop)
      metrics["expected_used_over_generated_latency"] = self._expectation.expected.used_over_generated
      metrics["expected_dropped_fraction"] = self._expectation.expected.dropped
    return metrics

  def end_step(self, version: int, params: PyTree | None = None) -> None:
    """Ends the step of the batch that was taken: it is trained on, and `version` is the policy's from now on.

    In a deterministic run what was begun under the old version ends under it first.

    Args:
      version: the policy version after the step.
      params: the new weights for the sampler, computed already: it would stall on weights that are still under way.
        None for a step that left the policy as it is, like those of the critic alone.
    """
    if self._deterministic:
      with self.waits("take"):
        # Not ended by a stop; but the look shows other processes that this one lives, and waits.
        self.loop.wait_until_idle(look=lambda: self.interrupt.requested)
    if params is not None:
      self._service.publish(params, version)
    self.loop.on_version(version)

  def check(self) -> None:
    """Raises the exception that stopped the rollout side, as itself."""
    self.loop.check()

  def look(self) -> None:
    """Looks around while other processes are waited for: raises what fails here, and tells them of a stop."""
    self._look()
    self.check()
    _ = self.interrupt.requested

  def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns (JSON, numpy arrays): everything needed to go on, see `RolloutLoop.state_dict`."""
    return self.loop.state_dict()

  def load_state_dict(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Goes on from a saved state; call it before the context begins."""
    self.loop.load_state_dict(state, arrays)


def make_rollouts(
  learner: Learner,
  service: SamplerService,
  workdir: pathlib.Path,
  phase: str,
  step: int,
  version: int,
  interrupt: StopSignal,
  look: Callable[[], None] = lambda: None,
  is_heldout: Callable[[PromptKey], bool] = lambda key: False,
) -> Rollouts:
  """Makes the rollout side of a phase in this process, not started. The record of later steps than `step` is removed.

  Args:
    learner: packs batches, and holds the run's configuration.
    service: the sampler.
    workdir: the run's folder.
    phase: name of the phase.
    step: train steps done before.
    version: the policy version that the service starts with.
    interrupt: ends the wait for a batch.
    look: called now and then while waiting for a batch; may raise.
    is_heldout: True for prompts that are not trained on.
  """
  rollout = share_of_batch(learner.config, learner.share.count)
  record = Record(workdir, phase, learner.share.index)
  record.forget_after(step)
  return Rollouts(
    make_rollout_loop(learner, service, phase, version, is_heldout),
    rollout.batch_size,
    interrupt,
    service=service,
    record=record if rollout.record or rollout.deterministic else None,
    first_step=step,
    deterministic=rollout.deterministic,
    look=look,
    # Nothing grows old under a policy that never changes.
    expectation=None if phase == VALUE_PRETRAINING else Expectation(rollout, _places(learner.config)),
    agree=functools.partial(agreed_batch, learner),
  )


def _places(config: RunConfig) -> int:
  """Episodes at the same time."""
  return config.rollout.max_in_flight or config.sampler.num_slots


def make_rollout_loop(
  learner: Learner,
  service: SamplerService,
  phase: str,
  version: int,
  is_heldout: Callable[[PromptKey], bool] = lambda key: False,
) -> RolloutLoop:
  """Makes the asynchronous loop of this process, not started, on its share of the training prompts."""
  config, tokenizer = learner.config, learner.config.environment.tokenizer()
  rollout, method = share_of_batch(config, learner.share.count), config.algorithm

  # From finished trajectories to batches.
  buffer = TrajectoryBuffer(
    Ledger.of(rollout),
    max_staleness=rollout.max_staleness,
    staleness=rollout.staleness,
    train_truncated=method.truncation != "mask",
    is_heldout=is_heldout,
    required_experts=required_experts(config),
    longest_context=max(rollout.row_lengths),
    version=version,
    baselines=RunningMeans(method.baseline_window, method.baseline_scope) if method.needs_baselines else None,
    filter_equal_groups=rollout.filter_equal_groups,
  )

  # From prompts to finished trajectories. The critic's pretraining wants all prompts.
  prompts, on_trained = _prompts(config, tokenizer, phase, learner.share), lambda trajectories: None
  if phase == TRAIN and rollout.difficulty_floor < 1.0:
    prompts = _filtered(prompts, rollout, prompt_seed(config, phase), buffer)
    on_trained = prompts.note
  return RolloutLoop(
    lambda: config.environment.make(tokenizer),
    prompts,
    service,
    buffer,
    rollout,
    context_length=config.sampler.context_length,
    vocab_size=config.model.vocab_size,
    max_in_flight=_places(config),
    temperature=config.sampler.temperature,
    watchdog_seconds=config.training.watchdog_seconds,
    on_trained=on_trained,
  )


def _filtered(prompts: PromptStream, rollout: RolloutConfig, seed: int, buffer: TrajectoryBuffer) -> DifficultyFilter:
  """Filters prompts by their difficulty; the buffer's statistics count those that are left out."""

  def count() -> None:
    with buffer.ledger.lock:
      buffer.statistics.add("excluded_prompts")

  floor, decay, passes = rollout.difficulty_floor, rollout.difficulty_decay, rollout.difficulty_passes
  return DifficultyFilter(prompts, floor=floor, decay=decay, passes=passes, seed=seed, on_excluded=count)


def _prompts(config: RunConfig, tokenizer: Any, phase: str, share: DataShare) -> Any:
  """Makes the iterator over this process's share of the training prompts, in the phase's order."""
  source = config.environment.prompts(tokenizer, "train", config.training.seed)
  return make_prompt_iterator(source, seed=prompt_seed(config, phase), shard=(share.index, share.count))
