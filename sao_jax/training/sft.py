"""Imitation cold start: maximum likelihood of the demonstrations that the environment produces."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from sao_jax.algorithm.network import Network, gradient_step
from sao_jax.algorithm.reductions import masked_count, masked_mean, masked_sum
from sao_jax.announce import FirstUses
from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import check_storable, expand
from sao_jax.configuration.relations import validate
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.environments.base import check_token_ids
from sao_jax.episode import BadPrompt, EnvironmentFailure, Prompt, Status, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.interrupt import Interrupt
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.lora_start import check_lora_scale
from sao_jax.learner.packing import check_row_counts
from sao_jax.learner.restoring import restore_state
from sao_jax.learner.setup import abstract_network, make_learner, make_network_state, rows_multiple
from sao_jax.parallel.process import data_process_count, data_process_index
from sao_jax.report.run_log import RunLog
from sao_jax.rollout.bad_prompts import BadPrompts
from sao_jax.training import phases
from sao_jax.training.origins import warn_of_later_phases
from sao_jax.training.run_folder import open_run
from sao_jax.training.saver import skips, stop_if_diverged
from sao_jax.training.step_metrics import StepClock
from sao_jax.types import NetworkState, PolicyOutputs, PyTree, TrajectoryBatch

# Sources may draw a prompt from (seed, id): the expert's mistakes must come from another stream than the question.
DEMONSTRATION_STREAM = 0x5AFE_DE30

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


class Demonstrations:
  """Endless batches of demonstrations on the training prompts.

  Every demonstration's randomness comes from its prompt's key and the seed, so a restored iterator goes on exactly.

  Attributes:
    prompts: where they come from.
    bad_prompts: those that were skipped.
  """

  def __init__(self, config: RunConfig):
    self._config, self._environment = config, config.environment
    if not hasattr(self._environment, "demonstration"):
      raise ConfigError(
        "environment",
        f"{self._environment.name} produces no demonstrations to imitate",
        "give its settings a `demonstration(prompt, tokenizer, rng)` method, or start RL from model.checkpoint",
      )
    self._tokenizer, self.bad_prompts = self._environment.tokenizer(), BadPrompts()
    source = self._environment.prompts(self._tokenizer, "train", config.training.seed)
    self.prompts = make_prompt_iterator(
      source, seed=phases.prompt_seed(config, phases.SFT), shard=(data_process_index(), data_process_count())
    )

  def batch(self) -> list[Trajectory]:
    """Makes the next `sft.batch_size` demonstrations, as trajectories without behaviour log-probs.

    Prompts are skipped whose demonstration is too long, is none, or fails with an `EnvironmentFailure`, and those that
    their source calls damaged. Any other exception of the expert is raised as itself.

    Raises:
      NothingButBadPrompts: very many in a row were skipped.
    """
    batch: list[Trajectory] = []
    while len(batch) < self._config.sft.batch_size:
      prompt = None
      try:
        prompt = next(self.prompts)
        batch.append(self._demonstrate(prompt, len(batch)))
      except BadPrompt as problem:
        self.bad_prompts.skip(problem, prompt and prompt.key)
      except EnvironmentFailure as failure:
        self.bad_prompts.skip(_failed(failure), prompt.key)
      else:
        self.bad_prompts.good()
    return batch

  def _demonstrate(self, prompt: Prompt, index: int) -> Trajectory:
    # Randomness of its own for every prompt and epoch.
    key = prompt.key
    rng = np.random.default_rng([DEMONSTRATION_STREAM, self._config.training.seed, key.id, key.epoch])
    demonstration = self._environment.demonstration(prompt, self._tokenizer, rng)
    name, vocab_size = self._environment.name, self._config.model.vocab_size
    ids = check_token_ids(demonstration.token_ids, environment=name, vocab_size=vocab_size, what="the demonstration")
    mask = np.asarray(demonstration.action_mask)
    if mask.dtype != np.bool_ or mask.shape != ids.shape:
      raise EnvironmentFailure(name, f"the demonstration's mask is {mask.dtype} {mask.shape}, of {len(ids)} tokens")

    # It must fit where an episode would.
    length = len(ids)
    if length > self._config.sampler.context_length:
      name, context = str(tuple(key)), self._config.sampler.context_length
      raise BadPrompt(
        "sampler.context_length",
        f"the demonstration on prompt {name} has {length} tokens, more than the context of {context}",
        f"set sampler.context_length and the largest rollout.row_lengths to at least {length}",
        reason="demonstration_too_long",
      )

    # The policy sampled none of it: neither log-probs nor versions.
    return Trajectory(
      token_ids=ids,
      action_mask=mask,
      behavior_logprobs=np.full(length, np.nan, np.float32),
      policy_version=np.full(length, -1, np.int32),
      turn_starts=np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1).astype(np.int32),
      reward=demonstration.reward,
      turn_rewards=demonstration.turn_rewards,
      status=Status.TERMINATED,
      key=key,
      rollout_id=index,
    )


def _failed(failure: EnvironmentFailure) -> BadPrompt:
  return BadPrompt(
    *("environment", str(failure), "mend the environment's `demonstration`, or leave such prompts out"),
    reason="demonstration_failed",
  )


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
  demonstrations = Demonstrations(config)
  policy = dataclasses.replace(learner.policy, after_update=None)  # routers are balanced in RL only
  first_uses = FirstUses()
  train_step = make_sft_step(policy, config.algorithm.micro_batches)

  with (
    open_run(recorded, workdir) as record,
    Checkpointer(workdir / phases.SFT, keep=settings.keep_checkpoints, every=settings.checkpoint_every) as checkpointer,
    Interrupt(saves=False) as interrupt,
  ):
    # Begin, or go on from the newest checkpoint: network and position in the prompts belong together.
    restored = restore_state(checkpointer, abstract_network(learner.policy, learner.layout))
    if restored is None or restored.step < config.sft.steps:
      warn_of_later_phases(workdir, phases.SFT, phases.PHASES[1:])
    if restored is None:
      clock = StepClock()
      params = phases.initial_policy(config, learner, workdir, earlier=())
      step, network = 0, make_network_state(learner.policy, learner.layout, params)
    else:
      step, network, host_state = restored
      check_lora_scale(config, network.params)
      demonstrations.prompts.set_state(host_state["prompts"])
      clock = StepClock(host_state.get("seconds", 0.0))  # early checkpoints do not say
    record()
    if step >= config.sft.steps:
      logging.info("sft: all steps are done (%d), there is nothing left to do.", step)

    def host_state() -> dict[str, Any]:
      return {"prompts": demonstrations.prompts.get_state(), "seconds": clock.seconds}

    with RunLog(
      workdir,
      phases.SFT,
      total=config.sft.steps,
      start=step,
      restored_step=step or None,
      every=settings.log_every,
      max_skipped_updates=settings.max_skipped_updates,
      facts=FACTS,
    ) as log:
      while step < config.sft.steps and not interrupt.requested:
        # Step: still running when the metrics of the step before are logged.
        skipped = demonstrations.bad_prompts.count
        batch = packed_batch(learner, demonstrations.batch())
        skipped = demonstrations.bad_prompts.count - skipped
        with first_uses(batch.rows.token_ids.shape, "Compiling the imitation step"):
          network, metrics = train_step(network, batch.rows)
        interrupt.saves = True
        step += 1
        log.push(step, metrics | {"demonstrations_skipped": skipped} | clock.lap(batch.trajectories))

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

  if interrupt.requested and step < config.sft.steps:
    logging.info("Interrupted and saved after step %d; the same command goes on from there.", saved or 0)
  return network.params
