"""The training loop: take a batch, step, publish, log, evaluate, save; rollouts run at the same time in their threads.

Value pretraining and RL are the same loop: a critic-only step leaves the policy, and so its version, as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable

import jax
from absl import logging

from sao_jax.announce import announced
from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.checkpoints.retention import Best, kept_steps
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import check_storable, expand
from sao_jax.configuration.relations import validate
from sao_jax.evaluation.audit import audit_at_start
from sao_jax.evaluation.fixed_policy import check_prompts
from sao_jax.evaluation.heldout import Evaluation
from sao_jax.evaluation.pinned import PinnedEvaluation
from sao_jax.interrupt import Interrupt, StopSignal
from sao_jax.learner.compilation import CompiledSteps
from sao_jax.learner.packing import check_row_counts
from sao_jax.learner.sampler_side import make_publisher, make_service
from sao_jax.learner.setup import Learner, make_learner, rows_multiple
from sao_jax.parallel.agreement import shared_stop
from sao_jax.report.episode_samples import EpisodeSamples
from sao_jax.report.metrics import evaluated_versions, measured_success
from sao_jax.report.run_log import RunLog
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.service import SamplerService
from sao_jax.training import phases
from sao_jax.training.experience import Experience, make_experience
from sao_jax.training.heap import frozen_heap
from sao_jax.training.heldout_critic import HeldoutCritic
from sao_jax.training.host_shares import share_host_state
from sao_jax.training.phases import Phase, Start
from sao_jax.training.process_metrics import of_a_step_that_is_done, reduced
from sao_jax.training.profile import Profile
from sao_jax.training.remote_rollouts import RemoteRollouts
from sao_jax.training.rollouts import Rollouts, make_rollouts
from sao_jax.training.run_folder import open_run
from sao_jax.training.saver import Saver, say_interrupted
from sao_jax.types import PyTree, TrainState

# Shown beside the progress of a phase.
FACTS = {
  "reward": "reward_mean",
  "lag": "lag_mean",
  "buffer": "rollouts_buffered",
  "ev": "explained_variance",
  "failed": "rollouts_failed_environment",
  "outages": "rollouts_failed_infrastructure",
}


@dataclasses.dataclass(frozen=True)
class Result:
  """The end of a phase.

  Attributes:
    state: the last train state.
    step: train steps done.
    interrupted: True if the process was asked to stop before the phase was over.
    evaluation: the last one that was collected; None without any.
  """

  state: TrainState
  step: int
  interrupted: bool
  evaluation: Evaluation | None


def pretrain_value(config: RunConfig, workdir: str | os.PathLike, *, validated: bool = False) -> Result:
  """Trains the critic, attention too, on rollouts of the frozen initial policy, until it no longer gets better.

  The measure is the explained variance of rollouts that are held out.

  `validated`: the caller has called `validate`.
  """
  changed = dataclasses.replace(config, critic_optimizer=config.value_pretraining.optimizer)
  phase = phases.value_pretraining(config)
  return run_phase(changed, expand(workdir), phase, freeze=False, validated=validated, recorded=config)


def train(config: RunConfig, workdir: str | os.PathLike, *, validated: bool = False) -> Result:
  """Trains policy and critic with asynchronous SAO; goes on where an earlier run in `workdir` stopped.

  `validated`: the caller has called `validate`, as launchers do before they write to `workdir`.

  Example:
    result = train(load_config("configs/calculator.py"), "runs/calculator")
    result.evaluation.success.rate
  """
  phase = phases.reinforcement_learning(config)
  return run_phase(config, expand(workdir), phase, freeze=True, validated=validated)


def run_phase(
  config: RunConfig,
  workdir: pathlib.Path,
  phase: Phase,
  *,
  freeze: bool,
  validated: bool = False,
  recorded: RunConfig | None = None,
) -> Result:
  """Runs a phase to its end, or to an interruption, from its newest checkpoint if it has one.

  Args:
    config: the run's configuration.
    workdir: holds `<phase>/` (checkpoints) and the metrics of all phases.
    phase: the steps to run.
    freeze: False trains the frozen part of the critic too.
    validated: the caller has called `validate`.
    recorded: the configuration to record in `workdir`, if the phase has changed it.
  """
  # Whatever cannot work is refused before any work starts.
  if not validated:
    validate(config, training=True)
  workdir = expand(workdir)
  check_storable(workdir, "--workdir")
  learner = make_learner(config, freeze=freeze)
  phases.check_critic(learner, phase)
  check_row_counts(config.rollout.row_counts, rows_multiple(learner))
  check_prompts(config)

  # Ctrl-C ends the phase after the step in progress, and saves it; a second one ends the program at once.
  settings = config.training
  best = Best(settings.keep_best, {}) if settings.keep_best else None
  with (
    open_run(recorded or config, workdir) as folder,
    Checkpointer(
      workdir / phase.name,
      keep=settings.keep_checkpoints,
      every=settings.checkpoint_every,
      share=functools.partial(share_host_state, share=learner.share),
      before=folder.store,
      own=learner.share,
      elsewhere=not learner.learns,
      best=best,
    ) as checkpointer,
    Interrupt(saves=False) as interrupt,
  ):
    with announced("Making or restoring the networks"), learner.processes.busy():
      start = phases.restore_or_begin(config, learner, workdir, phase, checkpointer)
    if phase.policy_steps:
      learner = phases.settle_objective(learner, critic_pretrained=start.critic_pretrained)
    folder.record()
    if best is not None:
      best.success.update(_known_success(learner, workdir, folder.files, phase, start))
    if _is_finished(learner, folder.files, phase, start):
      logging.info("%s: all steps are done (%d), there is nothing left to do.", phase.name, start.step)
      return Result(start.state, start.step, interrupted=False, evaluation=None)
    result = _run(config, learner, folder.files, phase, start, checkpointer, interrupt, best)
    saved = checkpointer.latest_step()

  if result.interrupted:
    say_interrupted(saved)
  return result


def _run(
  config: RunConfig,
  learner: Learner,
  files: pathlib.Path,
  phase: Phase,
  start: Start,
  checkpointer: Checkpointer,
  interrupt: Interrupt,
  best: Best | None,
) -> Result:
  """Trains from `start` to the end of the phase; metrics and the like go to the folder `files`.

  `best` learns of every evaluation, before the next checkpoint decides which ones stay.
  """
  # All processes stop together. Each that samples has rollouts, a sampler and a share of the prompts of its own.
  processes, stop = learner.processes, shared_stop(interrupt, learner.processes)

  # The learner's state, and the sampler's own copy of the policy.
  step, state, version = start.step, start.state, phase.version(start.step)
  publish = make_publisher(learner)
  weights = publish(state.policy.params)

  samples = _make_samples(config, files, phase, start, writes=learner.share.first)

  # Train steps compile in the background, from here on, while the sampler warms up and is audited.
  with (
    CompiledSteps(learner, phase.kinds(step)) as train_step,
    _make_log(config, files, phase, start, writes=processes.is_writer) as log,
    _make_service(learner, phase, version, weights) as service,
    PinnedEvaluation(
      config,
      stop,
      last_version=phase.policy_steps,
      service=service,
      processes=processes,
      share=learner.share,
      report=functools.partial(_report, log, samples, best),
    ) as evaluation,
    Profile(files / "profile", config.training.profile_steps) as profile,
    frozen_heap(),
  ):
    # Until here nothing was begun that could be lost.
    interrupt.saves = True
    if config.training.audit:
      with announced("Comparing the sampler with the learner"):
        audit_at_start(config, learner, service, state.policy.params, stop)

    # Rollouts go on with those that were in progress; the version that a process starts with is evaluated too.
    rollouts = _make_rollouts(learner, service, files, phase, start, stop, look=evaluation.check)
    evaluation.begin(step, version, weights, measured=_measured(learner, files, phase))

    # From here on rollouts run in their threads, and what was trained is saved if anything fails.
    critic = _make_heldout_critic(learner, log, rollouts, start)
    saver = Saver(
      checkpointer,
      phase,
      rollouts,
      log,
      start,
      heldout_variance=critic.variances,
      processes=processes,
      turn=functools.partial(_turn_to_save, service),
      also=lambda step: best is not None and phase.version(step) > 0 and evaluation.due(phase.version(step)),
    )
    saver.end_step(step, state)
    with rollouts, saver:
      while not phases.ended(config, phase, step, critic.variances):
        # Take: waits for the trajectories that finish first; None for all once a process was asked to stop.
        batch = rollouts.take(version)
        updates_policy = phase.updates_policy(step)
        if batch is None:
          break
        with rollouts.waits("compile"):
          compiled = train_step.wait(batch.rows, update_policy=updates_policy, interrupt=stop, look=rollouts.check)
        if not compiled:
          break

        # Step: dispatched here, and still running when the metrics of the step before are logged. Nothing can be saved
        # from here to the end of the step, since the old state is donated.
        saver.begin_step()
        with profile.step(step + 1):
          state, metrics = train_step(state, batch.rows, update_policy=updates_policy)
        step, version = step + 1, phase.version(step + 1)
        of_hosts = reduced(processes, rollouts.consumed(batch.trajectories))
        metrics = of_a_step_that_is_done(learner, state, metrics)
        log.push(step, metrics | of_hosts | {"policy_version": version})

        # Publish: the sampler goes on with the old weights until the new ones are computed, or it would stall on them.
        with _turn(service, "publish"):
          weights = publish(state.policy.params) if updates_policy else None
        if updates_policy:
          jax.block_until_ready(state)  # the step itself, which is no wait
        with rollouts.waits("publish"):
          jax.block_until_ready(weights)
        rollouts.end_step(version, weights)
        saver.end_step(step, state)

        # Measure, evaluate, sample, save: each when it is due.
        with rollouts.waits("evaluation"):
          critic.after(step, state)
          evaluation.after(step, version, weights, saves=saver.due(step), look=rollouts.check)
        samples.after(step, batch.trajectories)
        with rollouts.waits("save"):
          saver.after(step)

      # Finish what lags behind the last step.
      samples.finish()
      log.flush()
      evaluation.finish(version, look=rollouts.check)
    ended = phases.ended(config, phase, step, critic.variances)
    saver.save(ended=ended)
  cut = stop.requested and not (ended and evaluation.version is None)
  return Result(state, step, processes.any("the end of the phase", cut), evaluation.last)


def _is_finished(learner: Learner, workdir: pathlib.Path, phase: Phase, start: Start) -> bool:
  """Tells whether a phase has nothing left to do: no step, and no evaluation of the last version."""
  config = learner.config
  if not phases.ended(config, phase, start.step, start.heldout_variance):
    return False
  last = phase.version(start.step)
  measured = not config.evaluation.every or not phase.policy_steps or last in _measured(learner, workdir, phase)
  return measured and start.restored_step is not None


def _measured(learner: Learner, workdir: pathlib.Path, phase: Phase) -> list[int]:
  """Returns the policy versions whose held-out success is in the metrics, as the process that writes them reads it."""
  return learner.processes.first("the versions evaluated", sorted(evaluated_versions(workdir, phase.name)))


def _make_rollouts(
  learner: Learner,
  service: SamplerService | FollowingService | None,
  workdir: pathlib.Path,
  phase: Phase,
  start: Start,
  interrupt: StopSignal,
  look: Callable[[], None],
) -> Rollouts | Experience | RemoteRollouts:
  """Makes what gives every step its batch: rollouts as they finish, in value pretraining with a store of them."""
  if not learner.share.brings:
    return RemoteRollouts(learner, interrupt, look, service)
  version = phase.version(start.step)
  make = functools.partial(
    make_rollouts, learner, service, workdir, phase.name, start.step, version, interrupt, look=look
  )
  rollouts = make_experience(learner, make, start.step) if phase.until_plateau else make()
  if start.rollouts is not None:
    rollouts.load_state_dict(*start.rollouts)
  return rollouts


def _make_heldout_critic(
  learner: Learner, log: RunLog, rollouts: Rollouts | Experience | RemoteRollouts, start: Start
) -> HeldoutCritic:
  """Makes what measures the critic in value pretraining."""
  every = learner.config.value_pretraining.evaluate_every
  return HeldoutCritic(learner, log, rollouts.heldout, every=every, known=start.heldout_variance)


def _make_log(config: RunConfig, workdir: pathlib.Path, phase: Phase, start: Start, *, writes: bool) -> RunLog:
  """Makes the metrics and the progress of a phase, from the step on where it starts."""
  return RunLog(
    workdir,
    phase.name,
    total=phase.steps,
    start=start.step,
    restored_step=start.restored_step,
    every=config.training.log_every,
    max_skipped_updates=config.training.max_skipped_updates,
    facts=FACTS,
    writes=writes,
    trackers=config.training.trackers,
    project=config.training.tracker_project,
  )


def _make_samples(
  config: RunConfig, workdir: pathlib.Path, phase: Phase, start: Start, *, writes: bool
) -> EpisodeSamples:
  """Makes the keeper of the episodes that the report shows."""
  return EpisodeSamples(
    workdir,
    phase.name,
    config.environment.tokenizer(),
    steps=phase.steps,
    every=config.training.checkpoint_every,
    restored_step=start.restored_step,
    writes=writes,
  )


def _make_service(
  learner: Learner, phase: Phase, version: int, weights: PyTree
) -> contextlib.AbstractContextManager[SamplerService | FollowingService | None]:
  """Makes the sampler of a phase, compiled, with `weights` as policy version `version`; None where nothing samples."""
  config = learner.config
  if not learner.devices.samples:
    return contextlib.nullcontext()
  with learner.processes.busy():
    return make_service(
      config,
      weights,
      seed=phases.sampler_seed(config, phase.name, learner.devices.group),
      version=version,
      warm_up=True,
      keep_experts=config.algorithm.router_replay,
    )


def _turn(service: SamplerService | FollowingService | None, name: str) -> contextlib.AbstractContextManager[None]:
  """The place of a program with all processes among those of this process's sampler."""
  return contextlib.nullcontext() if service is None else service.turn(name)


def _turn_to_save(service: SamplerService | FollowingService | None) -> contextlib.AbstractContextManager[None]:
  """The place of a save; after a fault of the sampler, which starts nothing any more, it needs none."""
  return _turn(None if service is None or service.error is not None else service, "save")


def _known_success(
  learner: Learner, workdir: pathlib.Path, files: pathlib.Path, phase: Phase, start: Start
) -> dict[int, float]:
  """Returns the held-out success of the checkpoints up to `start`, as the process that writes metrics reads it."""
  kept = kept_steps(workdir / phase.name)
  known = measured_success(files, phase.name) if learner.processes.is_writer else {}
  before = [[step, known[step]] for step in kept if step in known and step <= start.step]
  found = learner.processes.first("the success of checkpoints", before)
  return {step: success for step, success in found if not math.isnan(success)}


def _report(log: RunLog, samples: EpisodeSamples, best: Best | None, step: int, evaluation: Evaluation) -> None:
  """Writes down an evaluation that began after `step`, and keeps one of its episodes."""
  if best is not None:
    best.success[step] = evaluation.success.rate
  log.write(step, evaluation.metrics() | {"policy_version": evaluation.policy_version})
  log.note(success=evaluation.success.rate)
  for trajectory in evaluation.trajectories[:1]:
    samples.keep(step, trajectory)
  logging.info("Version %d: held-out success %s.", evaluation.policy_version, evaluation.success)
