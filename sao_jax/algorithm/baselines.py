"""The estimator `running_mean`: REINFORCE with a running mean of returns for a baseline, without a critic."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from sao_jax.algorithm import pieces, tokens
from sao_jax.config import AlgorithmConfig
from sao_jax.errors import ConfigError
from sao_jax.types import TrajectoryBatch


def running_mean_advantages(
  config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
  """R - baseline on all sampled tokens of a trajectory, 0 elsewhere; the baseline came with the batch.

  Raises:
    ConfigError: the batch was packed without baselines.
  """
  del config, state_values
  if batch.baselines is None:
    raise ConfigError(
      "algorithm.advantage", "the batch has no baselines.", "Pack trajectories that carry `Trajectory.baseline`."
    )
  return jnp.where(tokens.sampled_tokens(batch), pieces.returns(batch) - batch.baselines, 0.0)
