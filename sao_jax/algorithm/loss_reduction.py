"""Denominators of the policy loss: what counts the same, a token or a trajectory."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sao_jax.algorithm import pieces
from sao_jax.algorithm.reductions import masked_count
from sao_jax.config import AlgorithmConfig
from sao_jax.types import TrajectoryBatch


def loss_scales(
  config: AlgorithmConfig, batch: TrajectoryBatch, trained: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
  """Weights of the tokens, and the denominator of their weighted sum, by `algorithm.policy_loss_reduction`.

      token_mean     1      N, the number of trained tokens of the global batch        SAO, DAPO (arXiv 2503.14476)
      sequence_mean  1/n_i  the number of trajectories, each of which counts the same  GRPO (arXiv 2402.03300)
      constant       1      the number of trajectories times `algorithm.loss_length`   Dr. GRPO (arXiv 2503.20783)

  n_i are the trained tokens of a trajectory; one without any is not counted.
  """
  ones = jnp.ones(trained.shape, jnp.float32)
  if config.policy_loss_reduction == "token_mean":
    return ones, masked_count(trained)
  trajectories = masked_count(pieces.last_sampled_tokens(batch, trained))
  if config.policy_loss_reduction == "constant":
    return ones, trajectories * config.loss_length
  return ones / jnp.maximum(pieces.count_per_trajectory(batch, trained), 1.0), trajectories
