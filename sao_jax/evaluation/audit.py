"""Sampler against learner, before the first step: the same tokens under the same weights must have the same log-probs.

Any difference at lag 0 is a fault (dropout, a temperature on one side only, filters, precision, stale weights) and
would silently eat the trust region of the importance ratios.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from absl import logging

from sao_jax.config import RunConfig
from sao_jax.errors import ConfigError
from sao_jax.evaluation.fixed_policy import run_episodes
from sao_jax.interrupt import Interrupt, Interrupted
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.setup import Learner
from sao_jax.sampler.service import SamplerService
from sao_jax.types import PyTree, TrajectoryBatch

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


def audit_sampler(
  config: RunConfig,
  learner: Learner,
  service: SamplerService,
  params: PyTree,
  interrupt: Interrupt | None = None,
) -> float:
  """Samples a few held-out episodes and compares the log-probs of sampler and learner on them, see `compare`.

  Args:
    config: the run's configuration.
    learner: its static half.
    service: a started sampler that holds the published copy of `params`.
    params: the learner's policy parameters.
    interrupt: ends it when the process is asked to stop.

  Raises:
    Interrupted: the process was asked to stop.
  """
  source = config.environment.prompts(config.environment.tokenizer(), "heldout", config.evaluation.seed)
  count = min(AUDITED_EPISODES, config.sampler.num_slots, len(source))
  prompts = [source[index] for index in range(count)]
  trajectories, failures = run_episodes(
    config, service, prompts, temperature=config.sampler.temperature, interrupt=interrupt
  )
  if failures:
    raise failures[0]
  batch = packed_batch(learner, trajectories)
  return compare(learner.policy.apply, params, batch.rows, config.training.audit_tolerance)


def audit_at_start(
  config: RunConfig, learner: Learner, service: SamplerService, params: PyTree, interrupt: Interrupt
) -> None:
  """Refuses to train when sampler and learner disagree at lag 0; says nothing when it was interrupted.

  Raises:
    SamplerMismatch: they disagree.
  """
  try:
    worst = audit_sampler(config, learner, service, params, interrupt)
  except Interrupted:
    return  # nothing is trained any more
  logging.info("Audit: sampler and learner log-probs agree to %.2g at lag 0.", worst)


def compare(policy_apply: Callable, params: PyTree, batch: TrajectoryBatch, tolerance: float) -> float:
  """Returns max |log-prob of the learner - log-prob of the sampler| over the sampled tokens of `batch`.

  Args:
    policy_apply: the learner's log-probability function.
    params: the parameters that sampled every token of the batch.
    batch: packed trajectories.
    tolerance: the largest difference allowed.

  Raises:
    SamplerMismatch: when it is exceeded, or a difference is not finite.
  """
  logprobs = jax.jit(lambda p, b: policy_apply(p, b).logprobs)(params, batch)
  mask = np.asarray(batch.action_mask)
  difference = np.abs(np.asarray(logprobs)[mask] - np.asarray(batch.behavior_logprobs)[mask])
  worst = float(difference.max())
  if not worst <= tolerance:
    raise SamplerMismatch(worst, float(difference.mean()), tolerance)
  return worst
