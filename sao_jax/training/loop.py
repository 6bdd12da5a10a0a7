"""The training loop: take a batch, step, publish, log; the rollout side runs at the same time in its own threads.

Value pretraining and RL are the same loop: a critic-only step leaves the policy, and so its version, as they are.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import jax
from absl import logging

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.config import RunConfig
from sao_jax.configuration.relations import validate
from sao_jax.episode import Trajectory
from sao_jax.errors import ConfigError
from sao_jax.evaluation.audit import audit_sampler
from sao_jax.evaluation.fixed_policy import check_prompts, record_episode
from sao_jax.evaluation.heldout import Evaluation
from sao_jax.evaluation.pinned import PinnedEvaluation
from sao_jax.interrupt import Interrupt, Interrupted
from sao_jax.learner.compilation import CompiledSteps
from sao_jax.learner.lora_start import check_lora_scale
from sao_jax.learner.packing import check_buckets
from sao_jax.learner.sampler_side import make_publisher, make_service
from sao_jax.learner.setup import Learner, abstract_state, make_learner, rows_multiple
from sao_jax.report.metrics import DelayedFetch, MetricsWriter, drop_lines_after, evaluated_versions
from sao_jax.report.page import EPISODES_FILE
from sao_jax.report.progress import Progress
from sao_jax.training import phases
from sao_jax.training.consumed import Record
from sao_jax.training.heap import settled_heap
from sao_jax.training.rollouts import POLL, StepMetrics, make_rollout_loop, take
from sao_jax.types import TrainState

COMPILING_STEPS = 2  # after so many steps of a process everything is compiled, for the rest of the run


@dataclasses.dataclass(frozen=True)
class Result:
  """How a phase ended: its state, the train steps done, whether it was interrupted, and the last evaluation."""

  state: TrainState
  step: int
  interrupted: bool
  evaluation: Evaluation | None


def pretrain_value(config: RunConfig, workdir: str | os.PathLike) -> Result:
  """Trains the critic, attention too, on rollouts of the frozen initial policy until explained variance plateaus."""
  config = dataclasses.replace(config, critic_optimizer=config.value_pretraining.optimizer)
  return run_phase(config, pathlib.Path(workdir), phases.value_pretraining(config), freeze=False)


def train(config: RunConfig, workdir: str | os.PathLike) -> Result:
  """Trains policy and critic with asynchronous SAO; goes on where an earlier run in `workdir` stopped."""
  return run_phase(config, pathlib.Path(workdir), phases.reinforcement_learning(config), freeze=True)


def run_phase(config: RunConfig, workdir: pathlib.Path, phase: phases.Phase, *, freeze: bool) -> Result:
  """Runs a phase to its end, or to an interruption, from its newest checkpoint if it has one.

  Args:
    config: the run's configuration.
    workdir: holds `<phase>/` (checkpoints) and the metrics of all phases.
    phase: what to run.
    freeze: whether the critic's frozen set applies.
  """
  validate(config, training=True)
  learner = make_learner(config, freeze=freeze)
  check_buckets(config.rollout, config.sampler.context_length, rows_multiple(learner))
  check_prompts(config)
  settings = config.training
  with (
    Checkpointer(workdir / phase.name, keep=settings.keep_checkpoints, every=settings.checkpoint_every) as checkpointer,
    Interrupt() as interrupt,
  ):
    restored = checkpointer.restore(abstract_state(learner))
    if restored is None:
      step, host_state = 0, None
      state = phases.initial_state(config, learner, workdir, phase)
    else:
      step, state, host_state = restored
      check_lora_scale(config, state.policy.params)
      logging.info("%s: going on after step %d of %d.", phase.name, step, phase.steps)
      if int(state.policy_version) != phase.version(step):
        raise ConfigError(
          "algorithm.critic_warmup_steps",
          f"after step {step} the checkpoint has version {int(state.policy_version)}, not {phase.version(step)}.",
          "Keep the number of critic-only steps that the run began with.",
        )
    run = _Run(config, workdir, phase, learner, checkpointer, interrupt)
    return run.to_end(step, state, host_state)


class _Run:
  """One run of a phase in this process."""

  def __init__(self, config, workdir, phase, learner: Learner, checkpointer: Checkpointer, interrupt: Interrupt):
    self.config, self.workdir, self.phase = config, workdir, phase
    self.learner, self.checkpointer, self.interrupt = learner, checkpointer, interrupt
    self.publish = make_publisher(learner)
    self.explained_variance: list[float] = []
    self.evaluation: Evaluation | None = None  # the last one
    self.latest: dict[str, Any] = {}

  def to_end(self, step: int, state: TrainState, host_state: dict[str, Any] | None) -> Result:
    """Trains from `step` to the end of the phase."""
    config, phase, first_step = self.config, self.phase, step
    published, version = self.publish(state.policy.params), phase.version(step)
    deterministic, restored_step = config.rollout.deterministic, None if host_state is None else step
    record = Record(self.workdir, phase.name)
    record.forget_after(step)
    drop_lines_after(self.workdir / EPISODES_FILE, phase.name, restored_step)
    with (
      CompiledSteps(self.learner, phase.kinds(step)) as train_step,
      MetricsWriter(self.workdir, phase.name, restored_step=restored_step) as writer,
      Progress(phase.name, total=phase.steps, start=step) as progress,
      make_service(
        config,
        published,
        seed=phases.sampler_seed(config, phase.name),
        version=version,
        warm_up=True,
        record_experts=config.algorithm.router_replay,
      ) as service,
      PinnedEvaluation(config, self.interrupt) as pinned,
      settled_heap(),
    ):
      if config.training.audit:
        self.audit(service, state)
      rollouts = make_rollout_loop(self.learner, service, phase.name, version)
      if host_state is not None:
        rollouts.load_state_dict(*host_state["rollouts"])
        self.explained_variance = host_state["explained_variance"]
      if self.evaluates(version) and version not in evaluated_versions(self.workdir, phase.name):
        pinned.start(published, version, step)
      rollouts.start()
      consistent = True  # whether `state` and `rollouts` are those of `step`, so that they can be saved
      delayed = DelayedFetch()
      unrecorded: Trajectory | None = None  # an episode of the last step, unless one of it is recorded
      try:
        step_metrics = StepMetrics(rollouts)
        while step < phase.steps and not self.plateaued(step):
          batch = take(rollouts, config.rollout.batch_size, version, self.interrupt, look=pinned.check)
          updates_policy = phase.updates_policy(step)
          if batch is None or not self.compiled(train_step, batch.rows, updates_policy, step - first_step, rollouts):
            break
          consistent = False
          state, metrics = train_step(state, batch.rows, update_policy=updates_policy)
          step, version = step + 1, phase.version(step + 1)
          if config.rollout.record or deterministic:
            record.write(step, batch.trajectories)
          metrics |= step_metrics.read(batch.trajectories) | {"policy_version": version}
          self.log(delayed.push(step, metrics), writer, progress)
          if updates_policy:
            # The sampler would stall on weights that are still being computed: it goes on with the old ones until then.
            published = jax.block_until_ready(self.publish(state.policy.params))
          if deterministic:
            rollouts.settle()  # what was begun under a version ends under it
          if updates_policy:
            service.publish(published, version)
          rollouts.on_version(version)
          consistent = True
          evaluates, saves = updates_policy and self.evaluates(version), self.checkpointer.due(step)
          # Before a save, since the weights of an older version are in no checkpoint: it could not be begun again.
          self.collect(pinned, writer, rollouts, wait=evaluates or (saves and pinned.version != version))
          if evaluates and pinned.version is None:
            pinned.start(published, version, step)
          unrecorded = batch.trajectories[0]
          if saves or step == 1 or step % max(1, phase.steps // 3) == 0:
            record_episode(config, self.workdir, phase.name, step, unrecorded)
            unrecorded = None
          if saves:
            self.log(delayed.flush(), writer, progress)
            self.save(step, state, rollouts)
        if unrecorded is not None:
          record_episode(config, self.workdir, phase.name, step, unrecorded)
        self.log(delayed.flush(), writer, progress)
        self.collect(pinned, writer, rollouts, wait=True)
      except Exception:
        if consistent:
          logging.error("Something failed; what was trained is saved: step %d.", step)
          self.log(delayed.flush(), writer, progress)
          self.save(step, state, rollouts)
          self.checkpointer.wait()
        raise
      finally:
        rollouts.stop()
      if pinned.version not in (None, version):
        logging.warning("The evaluation of version %d was interrupted: it is lost.", pinned.version)
      self.save(step, state, rollouts)
      self.checkpointer.wait()
    if self.interrupt.requested:
      logging.info("Interrupted and saved after step %d; the same command goes on from there.", step)
    return Result(state, step, self.interrupt.requested, self.evaluation)

  def compiled(self, train_step: CompiledSteps, rows, update_policy: bool, steps_done: int, rollouts) -> bool:
    """Waits for the step's program, and in the third step of a process for all of them; False when interrupted."""
    wanted = None if steps_done == COMPILING_STEPS else rows
    while not train_step.ready(wanted, update_policy=update_policy, timeout=POLL):
      rollouts.check()
      if self.interrupt.requested:
        return False
    return True

  def audit(self, service, state: TrainState) -> None:
    """Refuses to train when sampler and learner disagree at lag 0."""
    try:
      worst = audit_sampler(self.config, self.learner, service, state.policy.params, self.interrupt)
    except Interrupted:
      return  # nothing is trained any more
    logging.info("Audit: sampler and learner log-probs agree to %.2g at lag 0.", worst)

  def evaluates(self, version: int) -> bool:
    """Whether held-out success is measured at this version."""
    every, last = self.config.evaluation.every, self.phase.policy_steps
    return last > 0 and every > 0 and (version % every == 0 or version == last)

  def collect(self, pinned: PinnedEvaluation, writer: MetricsWriter, rollouts, *, wait: bool) -> None:
    """Writes the evaluation under way, if it has finished, under the step after which it began."""
    while (measured := pinned.collect(POLL if wait else 0.0)) is None:
      rollouts.check()
      if not wait or pinned.version is None or self.interrupt.requested:
        return
    step, self.evaluation = measured
    version, success = self.evaluation.policy_version, self.evaluation.success
    writer.write(step, self.evaluation.metrics() | {"policy_version": version})
    for trajectory in self.evaluation.trajectories[:1]:
      record_episode(self.config, self.workdir, self.phase.name, step, trajectory)
    self.latest["success"] = success.rate
    logging.info("Version %d: held-out success %s.", version, success)

  def plateaued(self, step: int) -> bool:
    """Whether value pretraining may end."""
    return self.phase.until_plateau and phases.plateaued(self.config, step, self.explained_variance)

  def log(self, fetched, writer: MetricsWriter, progress: Progress) -> None:
    """Writes the metrics of steps that have finished."""
    for step, metrics in fetched:
      self.explained_variance.append(float(metrics["explained_variance"]))
      self.latest |= {
        "reward": metrics["reward_mean"],
        "lag": metrics["lag_mean"],
        "buffer": metrics["rollouts_buffered"],
        "ev": metrics["explained_variance"],
      }
      if step % self.config.training.log_every == 0:
        writer.write(step, metrics)
      progress.update(step, **self.latest)

  def save(self, step: int, state: TrainState, rollouts) -> None:
    """Starts an asynchronous checkpoint of everything that the next step depends on."""
    host_state = {
      "rollouts": list(rollouts.state_dict()),
      "explained_variance": self.explained_variance,
      "policy_version": self.phase.version(step),
    }
    self.checkpointer.save(step, state, host_state)
