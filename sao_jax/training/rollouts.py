"""The rollout side of a run, as the training loop uses it: take a batch, end the step; with its numbers per step."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sao_jax.config import RunConfig
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import Trajectory
from sao_jax.interrupt import StopSignal
from sao_jax.learner.batches import packed_batch, required_experts
from sao_jax.learner.setup import Learner
from sao_jax.parallel.process import data_process_count, data_process_index
from sao_jax.rollout.buffer import TrajectoryBuffer
from sao_jax.rollout.ledger import Ledger
from sao_jax.rollout.outcomes import Outcome, Place
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.sampler.service import SamplerService
from sao_jax.training.consumed import Record
from sao_jax.training.phases import prompt_seed
from sao_jax.types import PyTree

POLL = 0.5  # seconds between two looks at a requested interruption while the trainer waits for a batch


class Rollouts:
  """Rollouts from the trainer's side; a context manager that starts and stops their loop.

  Example:
    with make_rollouts(learner, service, workdir, phase.name, step, version, interrupt) as rollouts:
      while (batch := rollouts.take(version)) is not None:
        state, metrics = train_step(state, batch.rows)
        metrics |= rollouts.metrics(batch.trajectories)
        version += 1
        rollouts.end_step(version, jax.block_until_ready(publish(state.policy.params)))

  Between `take` and `end_step` a batch is in training. A state saved in between has it as buffered, so
  it belongs with the parameters of before the step; a state saved at any other time belongs with the newest ones.

  Attributes:
    loop: the asynchronous loop.
    interrupt: ends the wait for a batch.
  """

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
    """
    self.loop, self.interrupt = loop, interrupt
    self._batch_size, self._service, self._deterministic, self._look = batch_size, service, deterministic, look
    self._record, self._step = record, first_step
    self._taken: Any = None  # the batch in training
    self._metrics: StepMetrics | None = None

  def __enter__(self) -> Rollouts:
    self.loop.start()
    self._metrics = StepMetrics(self.loop)
    return self

  def __exit__(self, *exc: object) -> None:
    self.loop.stop()

  def take(self, version: int) -> Any:
    """Waits for the batch of the step that updates `version`.

    Returns:
      What the buffer makes of its trajectories, in training a `Batch`; None once an interruption was requested.

    Raises:
      BaseException: what stopped the rollout side, or `look` raised, as itself.
    """
    while not self.interrupt.requested:
      self._look()
      self.check()
      try:
        batch = self.loop.buffer.take(self._batch_size, version, timeout=POLL)
      except TimeoutError:
        self.check()  # a TimeoutError of the rollout side itself is not ours to swallow
        continue

      self._taken = batch
      return batch
    return None

  def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Returns the host-side numbers of a step; call it once per step, while the device computes it."""
    return self._metrics.read(trajectories)

  def end_step(self, version: int, params: PyTree | None = None) -> None:
    """Ends the step of the batch that was taken: it is trained on, and `version` is the policy's from now on.

    Its trajectories are recorded for a later replay, if that is wanted.

    In a deterministic run what was begun under the old version ends under it first.

    Args:
      version: the policy version after the step.
      params: the new weights for the sampler, computed already: it would stall on weights that are still under way.
        None for a step that left the policy as it is, like those of the critic alone.
    """
    # What was consumed, before a checkpoint can say that it was; the device is at work meanwhile, or was.
    self._step += 1
    if self._record is not None:
      self._record.write(self._step, self._taken.trajectories)
    self._taken = None

    if self._deterministic:
      self.loop.wait_until_idle()
    if params is not None:
      self._service.publish(params, version)
    self.loop.on_version(version)

  def check(self) -> None:
    """Raises the exception that stopped the rollout side, as itself."""
    self.loop.check()

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
  """
  rollout = learner.config.rollout
  record = Record(workdir, phase)
  record.forget_after(step)
  return Rollouts(
    make_rollout_loop(learner, service, phase, version),
    rollout.batch_size,
    interrupt,
    service=service,
    record=record if rollout.record or rollout.deterministic else None,
    first_step=step,
    deterministic=rollout.deterministic,
    look=look,
  )


def make_rollout_loop(learner: Learner, service: SamplerService, phase: str, version: int) -> RolloutLoop:
  """Makes the asynchronous loop of this process, not started, on its share of the training prompts.

  Its buffer hands out packed rows on the learner's mesh, see `batches.Batch`.
  """
  config = learner.config
  rollout, tokenizer = config.rollout, config.environment.tokenizer()

  # From finished trajectories to batches.
  buffer = TrajectoryBuffer(
    Ledger.of(rollout),
    max_staleness=rollout.max_staleness,
    staleness=rollout.staleness,
    train_truncated=config.algorithm.truncation != "mask",
    required_experts=required_experts(config),
    version=version,
    make_batch=functools.partial(packed_batch, learner),
  )

  # From prompts to finished trajectories.
  return RolloutLoop(
    lambda: config.environment.make(tokenizer),
    _prompts(config, tokenizer, phase),
    service,
    buffer,
    rollout,
    context_length=config.sampler.context_length,
    vocab_size=config.model.vocab_size,
    max_in_flight=rollout.max_in_flight or config.sampler.num_slots,
    temperature=config.sampler.temperature,
    watchdog_seconds=config.training.watchdog_seconds,
  )


def _prompts(config: RunConfig, tokenizer: Any, phase: str) -> Any:
  """Makes the iterator over this process's share of the training prompts, in the phase's order."""
  source = config.environment.prompts(tokenizer, "train", config.training.seed)
  shard = data_process_index(), data_process_count()
  return make_prompt_iterator(source, seed=prompt_seed(config, phase), shard=shard)


class StepMetrics:
  """Host-side numbers of each train step, from the loop's running sums."""

  def __init__(self, loop: RolloutLoop):
    self._loop, self._before, self._began = loop, loop.stats(), time.monotonic()

  def read(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Returns the numbers since the last call; call it once per step, with the step's trajectories."""
    stats, now = self._loop.stats(), time.monotonic()

    # Times, since the last call.
    since = {
      name: stats[name] - self._before[name] for name in ("trainer_wait_seconds", "busy_slot_seconds", "slot_seconds")
    }
    seconds = max(now - self._began, 1e-9)
    metrics = {
      "step_seconds": seconds,
      "trainer_idle_fraction": since["trainer_wait_seconds"] / seconds,
      "slot_idle_fraction": 1.0 - since["busy_slot_seconds"] / max(since["slot_seconds"], 1e-9),
      "response_length_mean": float(np.mean([t.num_sampled for t in trajectories])),
      "turns_mean": float(np.mean([len(t.turn_starts) for t in trajectories])),
      "truncated_fraction": float(np.mean([t.status.truncated for t in trajectories])),
      "latency_mean": float(np.mean([t.info.get("latency", 0.0) for t in trajectories])),
    }

    # Counts and means over the run; `stats` has checked that the first of these is the sum of the others.
    metrics |= {f"rollouts_{name}": stats[name] for name in ("submitted", *(part.value for part in (*Place, *Outcome)))}
    metrics["rollouts_by_reason"] = {name: count for name, count in stats.items() if "/" in name}
    over_the_run = ("mean_generated_latency", "mean_used_latency", "masked_tokens", "retries", "drop_rate_by_length")
    metrics |= {name: stats[name] for name in over_the_run} | {"event_loop_gap": stats["max_event_loop_gap"]}
    self._before, self._began = stats, now
    return metrics
