"""Sampler against learner, before the first step: the same tokens under the same weights must have the same log-probs.

Any difference at lag 0 is a fault (dropout, a temperature on one side only, filters, precision, stale weights) and
would silently eat the trust region of the importance ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from absl import logging

from sao_jax.algorithm.network import map_micro_batches
from sao_jax.config import RunConfig
from sao_jax.episode import Prompt
from sao_jax.errors import ConfigError
from sao_jax.evaluation.fixed_policy import read_prompts, run_episodes
from sao_jax.interrupt import Interrupted, StopSignal
from sao_jax.learner.batches import agreed_batch
from sao_jax.learner.setup import Learner, micro_batches
from sao_jax.parallel.feeding import everywhere
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.service import SamplerService
from sao_jax.types import PolicyOutputs, PyTree, TrajectoryBatch

AUDITED_EPISODES = 8


class SamplerMismatch(ConfigError):
  """Disagreement of sampler and learner at lag 0."""

  def __init__(self, worst: float, mean: float, tolerance: float):
    super().__init__(
      "training.audit_tolerance",
      f"sampler and learner log-probabilities differ by up to {worst:.3g} (mean {mean:.3g}) for the same tokens under "
      f"the same weights; allowed are {tolerance:.3g}",
      "find the difference (precision, temperature, filters, cache dtype, weights that were not published); with bf16 "
      "networks raise training.audit_tolerance to what bf16 explains, about 0.05",
    )


class Audit(NamedTuple):
  """A comparison that passed.

  Attributes:
    worst: max |log-prob of the learner - log-prob of the sampler|; None where there was no sampled token to compare.
    compared: episodes that were compared.
    failures: what ended the other ones.
  """

  worst: float | None
  compared: int
  failures: list[Exception]

  def __str__(self) -> str:
    failed = f"; {len(self.failures)} failed, the first of {self.failures[0]}" if self.failures else ""
    return f"{self.compared} episodes{failed}"


def audit_sampler(
  config: RunConfig,
  learner: Learner,
  service: SamplerService | FollowingService | None,
  params: PyTree,
  interrupt: StopSignal | None = None,
) -> Audit:
  """Samples a few held-out episodes and compares the log-probs of sampler and learner on them, see `compare`.

  Training prompts take the place of a held-out split without any. An episode that fails is left out: a faulty
  environment says nothing about the sampler.

  Args:
    config: the run's configuration.
    learner: its static half.
    service: a started sampler that holds the published copy of `params`; None in a process that only learns.
    params: the learner's policy parameters.
    interrupt: ends it when the process is asked to stop.

  Raises:
    Interrupted: the process was asked to stop.
    SamplerMismatch: they disagree.
  """
  # At most a batch, which is what the rows are sure to hold.
  processes, share = learner.processes, learner.share
  trajectories, failures = [], []
  if share.brings:
    count = min(AUDITED_EPISODES, config.sampler.num_slots, config.rollout.batch_size // share.count)
    prompts = _prompts(config, count * share.count)[share.index :: share.count]
    try:
      trajectories, failures = run_episodes(
        config, service, prompts, temperature=config.sampler.temperature, interrupt=interrupt
      )
    except Interrupted:
      if processes.count == 1:
        raise
      trajectories = None

  # What there is; every sampler is compared with the one learner.
  batch = agreed_batch(learner, trajectories, lambda: interrupt is not None and interrupt.requested)
  if batch is None:
    raise Interrupted
  if not processes.any("audited tokens", any(trajectory.num_sampled for trajectory in trajectories)):
    return Audit(None, 0, failures)
  rows = batch.rows
  parts = micro_batches(learner, rows.token_ids.shape[0])  # like a train step: it needs no more memory

  def apply(params: PyTree, rows: TrajectoryBatch) -> PolicyOutputs:
    return map_micro_batches(lambda part: learner.policy.apply(params, part), rows, parts)

  replicated = learner.layout.sharding() if processes.count > 1 else None
  worst = None
  if learner.learns:
    with processes.busy():  # it compiles
      worst = compare(apply, params, rows, config.training.audit_tolerance, replicated)
  if learner.devices.apart:
    worst = processes.first("the audit", worst)
  return Audit(worst, len(trajectories), failures)


def audit_at_start(
  config: RunConfig,
  learner: Learner,
  service: SamplerService | FollowingService | None,
  params: PyTree,
  interrupt: StopSignal,
) -> None:
  """Refuses to train when sampler and learner disagree at lag 0; says nothing when it was interrupted.

  Raises:
    SamplerMismatch: they disagree.
  """
  try:
    audit = audit_sampler(config, learner, service, params, interrupt)
  except Interrupted:
    return  # nothing is trained any more
  if audit.worst is None:
    logging.warning("Audit: sampler and learner were not compared, there was nothing to compare (%s).", audit)
  else:
    logging.info("Audit: sampler and learner log-probs agree to %.2g at lag 0 (%s).", audit.worst, audit)


def _prompts(config: RunConfig, count: int) -> list[Prompt]:
  """Takes the first held-out prompts, or training ones where there are none."""
  tokenizer, environment = config.environment.tokenizer(), config.environment
  source = environment.prompts(tokenizer, "heldout", config.evaluation.seed)
  if not len(source):
    source = environment.prompts(tokenizer, "train", config.training.seed)
  return read_prompts(source, count)[0]


def compare(
  policy_apply: Callable,
  params: PyTree,
  batch: TrajectoryBatch,
  tolerance: float,
  replicated: jax.sharding.NamedSharding | None = None,
) -> float:
  """Returns max |log-prob of the learner - log-prob of the sampler| over the sampled tokens of `batch`.

  Args:
    policy_apply: the learner's log-probability function.
    params: the parameters that sampled every token of the batch.
    batch: packed trajectories.
    tolerance: the largest difference allowed.
    replicated: where the batch lives on devices of several processes, a sharding that brings all of it to each.

  Raises:
    SamplerMismatch: when it is exceeded, or a difference is not finite.
  """
  logprobs = jax.jit(lambda p, b: policy_apply(p, b).logprobs)(params, batch)
  logprobs, mask, recorded = everywhere((logprobs, batch.action_mask, batch.behavior_logprobs), replicated)
  difference = np.abs(logprobs[mask] - recorded[mask])
  worst = float(difference.max())
  if not worst <= tolerance:
    raise SamplerMismatch(worst, float(difference.mean()), tolerance)
  return worst
