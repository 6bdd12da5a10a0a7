"""The policy loss of SAO: Direct double-sided Importance Sampling, DIS (arXiv 2607.07508, eq. 1-3)."""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class TokenWeights(NamedTuple):
  """The factors with which advantages enter the loss, each in the shape of the tokens.

  Attributes:
    weights: f(ρ), fp32; for DIS the ratio inside the trust region, 0 outside and on unsampled tokens.
    rejected_low: sampled tokens that f takes out because ρ is low; for DIS those with ρ <= 1 - ε_low.
    rejected_high: the same for a high ρ; for DIS those with ρ >= 1 + ε_high.
  """

  weights: Float[Array, "*tokens"]
  rejected_low: Bool[Array, "*tokens"]
  rejected_high: Bool[Array, "*tokens"]


def log_ratios(
  logprobs: Float[Array, "*tokens"], behavior_logprobs: Float[Array, "*tokens"], action_mask: Bool[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
  """log ρ = log π - μ on sampled tokens, 0 elsewhere. fp32."""
  difference = jnp.asarray(logprobs, jnp.float32) - jnp.asarray(behavior_logprobs, jnp.float32)
  return jnp.where(action_mask, difference, 0.0)


def trust_region(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
  """The bounds log(1 - ε_low) and log(1 + ε_high) on log ρ; an ε_low of 1 or more is no lower bound."""
  return math.log1p(-epsilon_low) if epsilon_low < 1.0 else -math.inf, math.log1p(epsilon_high)


def dis_weights(
  log_ratio: Float[Array, "*tokens"], action_mask: Bool[Array, "*tokens"], *, epsilon_low: float, epsilon_high: float
) -> TokenWeights:
  """f(ρ): ρ where 1 - ε_low < ρ < 1 + ε_high, else 0, whatever the sign of the advantage.

  Decided on log ρ, and masked *before* exponentiating: with a very low μ, exp(log ρ) * 0 would be inf * 0 = NaN.

  Args:
    log_ratio: log π - μ.
    action_mask: True on sampled tokens.
    epsilon_low: static delta (not a bound); 1 or more means no lower bound.
    epsilon_high: static delta.
  """
  lower, upper = trust_region(epsilon_low, epsilon_high)
  keep = action_mask & (log_ratio > lower) & (log_ratio < upper)
  weights = jnp.where(keep, jnp.exp(jnp.where(keep, log_ratio, 0.0)), 0.0)
  return TokenWeights(weights, action_mask & (log_ratio <= lower), action_mask & (log_ratio >= upper))


def dis_policy_loss(
  logprobs: Float[Array, "*tokens"],
  behavior_logprobs: Float[Array, "*tokens"],
  advantages: Float[Array, "*tokens"],
  action_mask: Bool[Array, "*tokens"],
  *,
  epsilon_low: float,
  epsilon_high: float,
) -> Float[Array, "*tokens"]:
  """The loss of every token, - stop_gradient(f(ρ_k) A_k) log π(a_k | s_k): eq. 1 before its sum and its 1/N.

  The stop-gradient belongs to the method: differentiating through f would give the coefficient ρA(1 + log π), which
  flips the direction of the update wherever π < 1/e.

  N is the number of sampled tokens of the *global* batch, rejected ones included; never of a micro-batch, a device or a
  sequence.

  Args:
    logprobs: log π of each token, token-aligned; may be anything where not sampled.
    behavior_logprobs: μ, recorded when the token was sampled; may be NaN where not sampled.
    advantages: may be anything where not sampled.
    action_mask: True on sampled tokens.
    epsilon_low: static delta, 0.3 for reasoning, 0.8 for coding agents.
    epsilon_high: static delta, 5.0 for reasoning, 3.0 for coding agents.

  Returns:
    Token losses, fp32; 0 on rejected and on unsampled tokens. A sampled token whose μ is NaN never enters the loss; it
    makes the metric "delta_logprob" NaN, so it is noticed.

  >>> mask = jnp.ones(4, bool)
  >>> ratios, advantages = jnp.array([0.7, 0.8, 2.0, 6.0]), jnp.ones(4)
  >>> loss = lambda logprobs: dis_policy_loss(
  ...   logprobs, logprobs - jnp.log(ratios), advantages, mask, epsilon_low=0.3, epsilon_high=5.0
  ... ).sum() / 4
  >>> [round(float(x), 2) for x in jax.grad(loss)(jnp.full(4, -1.0))]
  [0.0, -0.2, -0.5, 0.0]
  """
  action_mask = jnp.asarray(action_mask, jnp.bool_)
  chex.assert_equal_shape([logprobs, behavior_logprobs, advantages, action_mask])
  log_ratio = log_ratios(logprobs, behavior_logprobs, action_mask)
  weights = dis_weights(log_ratio, action_mask, epsilon_low=epsilon_low, epsilon_high=epsilon_high).weights

  return weighted_loss(weights, logprobs, advantages)


def weighted_loss(
  weights: Float[Array, "*tokens"], logprobs: Float[Array, "*tokens"], advantages: Float[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
  """- stop_gradient(f A) log π of every token; 0, and without a gradient, where f is 0."""
  # Masked inside as well as outside: 0 times a NaN on a rejected token would be NaN, in the gradient too.
  keep = weights > 0.0
  coefficients = jax.lax.stop_gradient(weights * jnp.where(keep, jnp.asarray(advantages, jnp.float32), 0.0))
  return -coefficients * jnp.where(keep, jnp.asarray(logprobs, jnp.float32), 0.0)
