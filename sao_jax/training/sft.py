"""Imitation cold start: maximum likelihood of the demonstrations that the environment produces."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from sao_jax.algorithm.network import Network, gradient_step
from sao_jax.algorithm.reductions import masked_count, masked_mean, masked_sum
from sao_jax.announce import FirstUses
from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import check_storable, expand
from sao_jax.configuration.relations import validate
from sao_jax.interrupt import Interrupt
from sao_jax.learner.batches import agreed_batch
from sao_jax.learner.lora_start import check_lora_scale
from sao_jax.learner.packing import check_row_counts
from sao_jax.learner.restoring import restore_state
from sao_jax.learner.setup import abstract_network, make_learner, make_network_state, rows_multiple
from sao_jax.parallel.agreement import shared_stop
from sao_jax.report.run_log import RunLog
from sao_jax.training import phases
from sao_jax.training.demonstrations import Demonstrations
from sao_jax.training.host_shares import share_host_state
from sao_jax.training.origins import warn_of_later_phases
from sao_jax.training.process_metrics import of_a_step_that_is_done, reduced
from sao_jax.training.run_folder import open_run
from sao_jax.training.saver import say_interrupted, skips, stop_if_diverged
from sao_jax.training.step_metrics import StepClock
from sao_jax.types import NetworkState, PolicyOutputs, PyTree, TrajectoryBatch

FACTS = {"loss": "sft_loss", "entropy": "entropy"}  # shown beside the progress


def make_sft_step(policy: Network, micro_batches: int = 1) -> Callable:
  """Returns the jitted, donated `step(state, batch) -> (state, metrics)`: maximum likelihood of demonstrated tokens.

  The loss is their mean negative log-probability over the global batch; a gradient that is not finite skips the update.
  """

  def step(state: NetworkState, batch: TrajectoryBatch) -> tuple[NetworkState, dict[str, jax.Array]]:
    num_tokens = masked_count(batch.action_mask)

    # -(1/N) Σ log π over a part of the rows; the parts of all micro-batches add up to the loss.
    def loss_fn(params: PyTree, rows: TrajectoryBatch) -> tuple[jax.Array, PolicyOutputs]:
      outputs = policy.apply(params, rows)
      return masked_sum(-outputs.logprobs, rows.action_mask) / jnp.maximum(num_tokens, 1.0), outputs

    # One gradient step; a batch without demonstrated tokens leaves the policy as it is.
    allowed = lambda outputs: num_tokens > 0.0
    state, update, outputs = gradient_step(policy, state, loss_fn, batch, micro_batches=micro_batches, allowed=allowed)

    return state, {
      "sft_loss": update.loss,
      "entropy": masked_mean(outputs.entropy, batch.action_mask),
      "num_sampled_tokens": num_tokens,
      "policy_grad_norm": update.grad_norm,
      "policy_updates_skipped": 1.0 - update.applied,
    }

  return jax.jit(step, donate_argnums=0)


def sft(config: RunConfig, workdir: str | os.PathLike, *, validated: bool = False) -> PyTree:
  """Runs the phase to its end, or to an interruption, from its newest checkpoint; returns the policy's parameters.

  `validated`: the caller has called `validate`.
  """
  if not validated:
    validate(config, training=True)

  # Set-up: the policy alone, with the optimiser of this phase.
  workdir = expand(workdir)
  check_storable(workdir, "--workdir")
  recorded, config = config, dataclasses.replace(config, policy_optimizer=config.sft.optimizer)
  learner = make_learner(config)
  check_row_counts(config.rollout.row_counts, rows_multiple(learner))
  settings = config.training
  demonstrations = Demonstrations(config, share=learner.share)
  policy = dataclasses.replace(learner.policy, after_update=None)  # routers are balanced in RL only
  first_uses = FirstUses()
  train_step = make_sft_step(policy, config.algorithm.micro_batches)

  with (
    open_run(recorded, workdir) as folder,
    Checkpointer(
      workdir / phases.SFT,
      keep=settings.keep_checkpoints,
      every=settings.checkpoint_every,
      share=functools.partial(share_host_state, share=learner.share),
      before=folder.store,
      own=learner.share,
      elsewhere=not learner.learns,
    ) as checkpointer,
    Interrupt(saves=False) as interrupt,
  ):
    processes, stop = learner.processes, shared_stop(interrupt, learner.processes)
    # Begin, or go on from the newest checkpoint: network and position in the prompts belong together.
    with processes.busy():
      restored = restore_state(checkpointer, abstract_network(learner.policy, learner.layout))
    if restored is None or restored.step < config.sft.steps:
      warn_of_later_phases(workdir, phases.SFT, phases.PHASES[1:])
    if restored is None:
      clock = StepClock()
      with processes.busy():
        params = phases.initial_policy(config, learner, workdir, earlier=())
      step, network = 0, make_network_state(learner.policy, learner.layout, params)
    else:
      step, network, host_state = restored
      if learner.learns:
        check_lora_scale("model.lora", config.model.lora, network.params)
      if learner.share.brings:
        demonstrations.prompts.set_state(host_state["prompts"])
      clock = StepClock(host_state.get("seconds", 0.0))  # early checkpoints do not say
    folder.record()
    if step >= config.sft.steps:
      logging.info("sft: all steps are done (%d), there is nothing left to do.", step)

    def host_state() -> dict[str, Any]:
      return {"prompts": demonstrations.prompts.get_state(), "seconds": clock.seconds}

    with RunLog(
      folder.files,
      phases.SFT,
      total=config.sft.steps,
      start=step,
      restored_step=step or None,
      every=settings.log_every,
      max_skipped_updates=settings.max_skipped_updates,
      facts=FACTS,
      writes=processes.is_writer,
      trackers=settings.trackers,
      project=settings.tracker_project,
    ) as log:
      while step < config.sft.steps:
        # Step: still running when the metrics of the step before are logged. All processes stop together.
        skipped = demonstrations.bad_prompts.count
        size = config.sft.batch_size // learner.share.count if learner.share.brings else 0
        own = None if stop.requested else demonstrations.batch(size)
        batch = agreed_batch(learner, own, lambda: stop.requested)
        if batch is None:
          break
        skipped = demonstrations.bad_prompts.count - skipped
        metrics = {}
        if learner.learns:
          with first_uses(batch.rows.token_ids.shape, "Compiling the imitation step"), processes.busy():
            network, metrics = train_step(network, batch.rows)
        interrupt.saves = True
        step += 1
        of_hosts = reduced(processes, {"demonstrations_skipped": skipped} | clock.lap(batch.trajectories))
        metrics = of_a_step_that_is_done(learner, network, metrics)
        log.push(step, metrics | of_hosts)

        # Save, if it is due.
        if checkpointer.due(step) and not skips(log, checkpointer):
          checkpointer.save(step, network, host_state())
        stop_if_diverged(log, checkpointer)
      log.flush()

    # The last state, or that of an interruption.
    if step == config.sft.steps or not skips(log, checkpointer):
      checkpointer.save(step, network, host_state())
      checkpointer.wait()
    saved = checkpointer.latest_step()

  if step < config.sft.steps:
    say_interrupted(saved)
  return network.params
