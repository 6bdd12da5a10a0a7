"""The policy losses that a run can choose: each is the factor f with which a token's advantage enters (DIS is ours).

With ρ = exp(log π - μ), π the policy before its update and μ what the sampler recorded, every one of them has the
gradient of

    - sg[f(ρ, A) A] log π

and so differs from the others by its f alone:

    dis        ρ in (1 - ε_l, 1 + ε_h), else 0, whatever the sign of A     SAO, arXiv 2607.07508
    ppo        ρ, but 0 above 1 + ε_h where A > 0, and below 1 - ε_l where A < 0    arXiv 1707.06347; ε_l < ε_h: DAPO
    cispo      ρ clipped to [1 - ε_l, 1 + ε_h]                             MiniMax-M1, arXiv 2506.13585
    gspo       ppo's, of the geometric mean of ρ over the trajectory       arXiv 2507.18071
    reinforce  1

ε are deltas. Those of the configuration's defaults are DIS's; DAPO clips at .2 and .28, GSPO at 3e-4 and 4e-4.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sao_jax.algorithm import pieces
from sao_jax.algorithm.policy_loss import TokenWeights, dis_weights, log_ratios, trust_region, weighted_loss
from sao_jax.config import AlgorithmConfig
from sao_jax.types import TrajectoryBatch

# (log ρ, A, mask, ε_low, ε_high) -> f, and the tokens that it takes out.
Weights = Callable[
  [Float[Array, "*tokens"], Float[Array, "*tokens"], Bool[Array, "*tokens"], float, float], TokenWeights
]


def clipped_weights(
  log_ratio: Float[Array, "*tokens"],
  advantages: Float[Array, "*tokens"],
  mask: Bool[Array, "*tokens"],
  epsilon_low: float,
  epsilon_high: float,
) -> TokenWeights:
  """The f of min(ρA, clip(ρ)A): a token is out once it has moved beyond the region in the direction of its advantage.

  A token with A < 0 keeps its ρ however large it is: that is PPO's gradient, and not bounded.
  """
  lower, upper = trust_region(epsilon_low, epsilon_high)
  low = mask & (log_ratio < lower) & (advantages < 0.0)
  high = mask & (log_ratio > upper) & (advantages > 0.0)
  keep = mask & ~low & ~high
  return TokenWeights(jnp.where(keep, jnp.exp(jnp.where(keep, log_ratio, 0.0)), 0.0), low, high)


def cispo_weights(
  log_ratio: Float[Array, "*tokens"],
  advantages: Float[Array, "*tokens"],
  mask: Bool[Array, "*tokens"],
  epsilon_low: float,
  epsilon_high: float,
) -> TokenWeights:
  """The clipped ρ: no token is out. Those that were clipped are reported as rejected."""
  del advantages
  lower, upper = trust_region(epsilon_low, epsilon_high)
  weights = jnp.where(mask, jnp.exp(jnp.clip(jnp.where(mask, log_ratio, 0.0), lower, upper)), 0.0)
  return TokenWeights(weights, mask & (log_ratio < lower), mask & (log_ratio > upper))


def _dis_weights(log_ratio, advantages, mask, epsilon_low, epsilon_high) -> TokenWeights:
  del advantages
  return dis_weights(log_ratio, mask, epsilon_low=epsilon_low, epsilon_high=epsilon_high)


def _unit_weights(log_ratio, advantages, mask, epsilon_low, epsilon_high) -> TokenWeights:
  del log_ratio, advantages, epsilon_low, epsilon_high
  return TokenWeights(mask.astype(jnp.float32), jnp.zeros_like(mask), jnp.zeros_like(mask))


# `algorithm.policy_loss` names one of these.
POLICY_LOSSES: dict[str, Weights] = {
  "dis": _dis_weights,
  "ppo": clipped_weights,
  "cispo": cispo_weights,
  "gspo": clipped_weights,
  "reinforce": _unit_weights,
}


def of_trajectories(config: AlgorithmConfig) -> bool:
  """True for losses whose ratio is one of the whole trajectory: it must be known before the first micro-batch."""
  return config.policy_loss == "gspo"


def mean_log_ratios(
  logprobs: Float[Array, "B T"], batch: TrajectoryBatch, trained: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
  """The mean of log ρ over the trained tokens of each trajectory, on every token of it."""
  ratios = log_ratios(logprobs, batch.behavior_logprobs, trained)
  return pieces.trajectory_totals(ratios, batch) / jnp.maximum(pieces.count_per_trajectory(batch, trained), 1.0)


def token_weights(
  config: AlgorithmConfig,
  log_ratio: Float[Array, "*tokens"],
  advantages: Float[Array, "*tokens"],
  mask: Bool[Array, "*tokens"],
) -> TokenWeights:
  """f of every token, by the loss that the configuration names; `log_ratio` is the trajectory's where it wants that."""
  weights = POLICY_LOSSES[config.policy_loss]
  return weights(log_ratio, jnp.where(mask, advantages, 0.0), mask, config.epsilon_low, config.epsilon_high)


def policy_token_losses(
  config: AlgorithmConfig,
  logprobs: Float[Array, "*tokens"],
  behavior_logprobs: Float[Array, "*tokens"],
  advantages: Float[Array, "*tokens"],
  mask: Bool[Array, "*tokens"],
  trajectory_log_ratio: Float[Array, "*tokens"] | None = None,
) -> Float[Array, "*tokens"]:
  """The loss of every token, -sg[f(ρ, A) A] log π, before its sum; fp32, 0 where f is and outside of the mask.

  Args:
    config: names the loss, and ε.
    logprobs: log π of each token.
    behavior_logprobs: μ, recorded when the token was sampled.
    advantages: of each token.
    mask: the trained tokens; anything may stand elsewhere.
    trajectory_log_ratio: from `mean_log_ratios`, for losses `of_trajectories`.
  """
  own = log_ratios(logprobs, behavior_logprobs, mask) if trajectory_log_ratio is None else trajectory_log_ratio
  return weighted_loss(token_weights(config, own, advantages, mask).weights, logprobs, advantages)
