"""The training loop: take a batch, step, publish, log, evaluate, save; rollouts run at the same time in their threads.

Value pretraining and RL are the same loop: a critic-only step leaves the policy, and so its version, as they are.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import jax
from absl import logging

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.config import RunConfig
from sao_jax.configuration.relations import validate
from sao_jax.evaluation.audit import audit_at_start
from sao_jax.evaluation.fixed_policy import check_prompts
from sao_jax.evaluation.heldout import Evaluation
from sao_jax.evaluation.pinned import PinnedEvaluation
from sao_jax.interrupt import Interrupt
from sao_jax.learner.compilation import CompiledSteps
from sao_jax.learner.packing import check_row_counts
from sao_jax.learner.sampler_side import make_publisher, make_service
from sao_jax.learner.setup import Learner, make_learner, rows_multiple
from sao_jax.report.episode_samples import EpisodeSamples
from sao_jax.report.metrics import evaluated_versions
from sao_jax.report.run_log import RunLog
from sao_jax.training import phases
from sao_jax.training.heap import frozen_heap
from sao_jax.training.phases import EXPLAINED_VARIANCE, Phase, Start
from sao_jax.training.rollouts import make_rollouts
from sao_jax.training.saver import Saver
from sao_jax.types import TrainState

# Shown beside the progress of a phase.
FACTS = {"reward": "reward_mean", "lag": "lag_mean", "buffer": "rollouts_buffered", "ev": EXPLAINED_VARIANCE}


@dataclasses.dataclass(frozen=True)
class Result:
  """How a phase ended: its state, the train steps done, whether it was interrupted, and the last evaluation."""

  state: TrainState
  step: int
  interrupted: bool
  evaluation: Evaluation | None


def pretrain_value(config: RunConfig, workdir: str | os.PathLike, *, validated: bool = False) -> Result:
  """Trains the critic, attention too, on rollouts of the frozen initial policy until explained variance plateaus.

  `validated`: as in `train`.
  """
  config = dataclasses.replace(config, critic_optimizer=config.value_pretraining.optimizer)
  phase = phases.value_pretraining(config)
  return run_phase(config, pathlib.Path(workdir), phase, freeze=False, validated=validated)


def train(config: RunConfig, workdir: str | os.PathLike, *, validated: bool = False) -> Result:
  """Trains policy and critic with asynchronous SAO; goes on where an earlier run in `workdir` stopped.

  `validated`: the caller has called `validate`, as launchers do before they write to `workdir`.

  As in `train(load_config("configs/calculator.py"), "runs/a").evaluation.success.rate`.
  """
  phase = phases.reinforcement_learning(config)
  return run_phase(config, pathlib.Path(workdir), phase, freeze=True, validated=validated)


def run_phase(
  config: RunConfig, workdir: pathlib.Path, phase: Phase, *, freeze: bool, validated: bool = False
) -> Result:
  """Runs a phase to its end, or to an interruption, from its newest checkpoint if it has one.

  Args:
    config: the run's configuration.
    workdir: holds `<phase>/` (checkpoints) and the metrics of all phases.
    phase: the steps to run.
    freeze: whether the critic's frozen set applies.
    validated: as in `train`.
  """
  if not validated:
    validate(config, training=True)
  learner = make_learner(config, freeze=freeze)
  phases.check_critic(learner, phase)
  check_row_counts(config.rollout.row_counts, rows_multiple(learner))
  check_prompts(config)

  settings = config.training
  with (
    Checkpointer(workdir / phase.name, keep=settings.keep_checkpoints, every=settings.checkpoint_every) as checkpointer,
    Interrupt() as interrupt,
  ):
    start = phases.restore_or_begin(config, learner, workdir, phase, checkpointer)
    result = _run(config, learner, workdir, phase, start, checkpointer, interrupt)
  if result.interrupted:
    logging.info("Interrupted and saved after step %d; the same command goes on from there.", result.step)
  return result


def _run(
  config: RunConfig,
  learner: Learner,
  workdir: pathlib.Path,
  phase: Phase,
  start: Start,
  checkpointer: Checkpointer,
  interrupt: Interrupt,
) -> Result:
  """Trains from `start` to the end of the phase."""
  step, state, version = start.step, start.state, phase.version(start.step)
  publish = make_publisher(learner)
  weights = publish(state.policy.params)

  samples = EpisodeSamples(
    workdir,
    phase.name,
    config.environment.tokenizer(),
    steps=phase.steps,
    every=config.training.checkpoint_every,
    restored_step=start.restored_step,
  )

  def report(step: int, evaluation: Evaluation) -> None:
    log.write(step, evaluation.metrics() | {"policy_version": evaluation.policy_version})
    log.note(success=evaluation.success.rate)
    for trajectory in evaluation.trajectories[:1]:
      samples.keep(step, trajectory)
    logging.info("Version %d: held-out success %s.", evaluation.policy_version, evaluation.success)

  with (
    CompiledSteps(learner, phase.kinds(step)) as train_step,
    RunLog(
      workdir,
      phase.name,
      total=phase.steps,
      start=step,
      restored_step=start.restored_step,
      every=config.training.log_every,
      facts=FACTS,
      keep={EXPLAINED_VARIANCE: start.explained_variance},
    ) as log,
    make_service(
      config,
      weights,
      seed=phases.sampler_seed(config, phase.name),
      version=version,
      warm_up=True,
      record_experts=config.algorithm.router_replay,
    ) as service,
    PinnedEvaluation(config, interrupt, last_version=phase.policy_steps, report=report) as evaluation,
    frozen_heap(),
  ):
    if config.training.audit:
      audit_at_start(config, learner, service, state.policy.params, interrupt)
    rollouts = make_rollouts(learner, service, workdir, phase.name, step, version, interrupt, look=evaluation.check)
    if start.rollouts is not None:
      rollouts.load_state_dict(*start.rollouts)
    evaluation.begin(step, version, weights, measured=evaluated_versions(workdir, phase.name))

    saver = Saver(checkpointer, phase, rollouts, log)
    saver.end_step(step, state)
    with rollouts, saver:
      while not phases.ended(config, phase, step, log.history[EXPLAINED_VARIANCE]):
        # Take: waits for the trajectories that finish first; None once the process was asked to stop.
        batch = rollouts.take(version)
        updates_policy = phase.updates_policy(step)
        if batch is None or not train_step.wait(
          batch.rows, update_policy=updates_policy, interrupt=interrupt, look=rollouts.check
        ):
          break

        # Step: dispatched here, and still running when the metrics of the step before are logged.
        saver.begin_step()
        state, metrics = train_step(state, batch.rows, update_policy=updates_policy)
        step, version = step + 1, phase.version(step + 1)
        log.push(step, metrics | rollouts.metrics(batch.trajectories) | {"policy_version": version})

        # Publish: the sampler goes on with the old weights until the new ones are computed, or it would stall on them.
        weights = jax.block_until_ready(publish(state.policy.params)) if updates_policy else None
        rollouts.end_step(version, weights)
        saver.end_step(step, state)

        # Evaluate, sample, save: each when it is due.
        evaluation.after(step, version, weights, saves=saver.due(step), look=rollouts.check)
        samples.after(step, batch.trajectories[0])
        saver.after(step)

      samples.finish()
      log.flush()
      evaluation.finish(version, look=rollouts.check)
    saver.save()
  return Result(state, step, interrupt.requested, evaluation.last)
