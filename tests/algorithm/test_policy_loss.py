"""The DIS loss: weights, gradient coefficients, denominators, masking, and audits of the ratio at lag 0."""

from __future__ import annotations

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sao_jax.algorithm.policy_loss import dis_policy_loss, dis_weights, log_ratios
from sao_jax.algorithm.reductions import masked_count, masked_sum

REASONING = {"epsilon_low": 0.3, "epsilon_high": 5.0}
CODING = {"epsilon_low": 0.8, "epsilon_high": 3.0}


def mean_loss(logprobs, behavior_logprobs, advantages, mask, denominator=None, **epsilons):
  """The token losses as the train step sums them: over the sampled tokens, divided by N."""
  losses = dis_policy_loss(logprobs, behavior_logprobs, advantages, mask, **epsilons)
  assert losses.shape == jnp.shape(mask)
  return masked_sum(losses, mask) / jnp.maximum(masked_count(mask) if denominator is None else denominator, 1.0)


def coefficients(ratios, advantages=1.0, mask=None, **epsilons):
  """The factors on ∇ log π before the division by N: -N * d loss / d log π, at log π = 0 and μ = -log ρ."""
  ratios = np.asarray(ratios, np.float32)
  mask = np.ones(ratios.shape, bool) if mask is None else np.array(mask, bool)
  advantages = np.broadcast_to(np.asarray(advantages, np.float32), ratios.shape)
  loss = lambda logprobs: mean_loss(logprobs, -np.log(ratios), advantages, mask, **epsilons)
  return -mask.sum() * np.asarray(jax.grad(loss)(jnp.zeros(ratios.shape, jnp.float32)))


@pytest.mark.parametrize(
  ("epsilons", "ratios", "weights"),
  [
    (REASONING, [0.5, 0.71, 1, 3, 6, 0.69, 6.01], [0, 0.71, 1, 3, 0, 0, 0]),
    (CODING, [0.1, 0.21, 1, 3.9, 4], [0, 0.21, 1, 3.9, 0]),
    # the bounds themselves are rejected, their neighbours are not
    (REASONING, [0.7, 0.7001, 5.999, 6.0], [0, 0.7001, 5.999, 0]),
    (CODING, [0.2, 0.2001, 3.999, 4.0], [0, 0.2001, 3.999, 0]),
    # ε are deltas, and not symmetric: 1/5.9 is far outside
    (REASONING, [1 / 5.9, 5.9, 1 / 1.3, 1 / 0.71], [0, 5.9, 1 / 1.3, 1 / 0.71]),
    ({"epsilon_low": 1.0, "epsilon_high": 1.0}, [1e-30, 0.5, 1.99, 2.0], [1e-30, 0.5, 1.99, 0]),
  ],
)
def test_weights(epsilons, ratios, weights):
  log_ratio = np.log(np.array(ratios, np.float32))
  got = dis_weights(log_ratio, np.ones(len(ratios), bool), **epsilons)
  np.testing.assert_allclose(got.weights, weights, rtol=1e-6)
  np.testing.assert_allclose(coefficients(ratios, **epsilons), weights, rtol=1e-6)
  rejected = np.array(weights) == 0
  np.testing.assert_array_equal(got.rejected_low, rejected & (np.array(ratios) < 1))
  np.testing.assert_array_equal(got.rejected_high, rejected & (np.array(ratios) > 1))


# ρ, Â -> coefficient under (0.3, 5.0) and (0.8, 3.0): masking, never clamping; the sign of Â does not matter. The last
# column is that of PPO with the clip 0.2 / 0.28.
TABLE = [
  (8, -1, 0, 0, -8),
  (8, 1, 0, 0, 0),
  (3, 1, 3, 3, 0),
  (3, -1, -3, -3, -3),
  (0.5, 1, 0, 0.5, 0.5),
  (0.5, -1, 0, -0.5, 0),
  (0.1, 1, 0, 0, 0.1),
  (0.1, -1, 0, 0, 0),
  (1, 2, 2, 2, 2),
  (5, -2, -10, 0, -10),
]


@pytest.mark.parametrize(("column", "epsilons"), [(2, REASONING), (3, CODING)])
def test_gradient_coefficients(column, epsilons):
  table = np.array(TABLE, np.float32)
  np.testing.assert_allclose(coefficients(table[:, 0], table[:, 1], **epsilons), table[:, column], rtol=1e-6)


def test_where_the_coefficients_are_not_those_of_ppo():
  """PPO's by differences of its objective, min(ρÂ, clip(ρ, 0.8, 1.28) Â), along log π."""
  ratios, advantages, *_, expected = np.array(TABLE, np.float64).T
  objective = lambda rho: np.minimum(rho * advantages, np.clip(rho, 0.8, 1.28) * advantages)
  step = 1e-5
  ppo = (objective(ratios * np.exp(step)) - objective(ratios * np.exp(-step))) / (2 * step)
  np.testing.assert_allclose(ppo, expected, atol=1e-6)
  differs = lambda epsilons: np.flatnonzero(~np.isclose(coefficients(ratios, advantages, **epsilons), ppo)).tolist()
  assert differs(REASONING) == [0, 2, 4, 6]
  assert differs(CODING) == [0, 2, 5, 6, 9]


def test_denominator_counts_rejected_tokens():
  """ρ = [.7, .8, 2, 6]: kept coefficients .8 + 2 = 2.8 over 4 tokens give .7, not 2.8 / 2."""
  ratios = np.array([0.7, 0.8, 2.0, 6.0], np.float32)
  kept = coefficients(ratios, **REASONING)
  np.testing.assert_allclose(kept.sum() / 4, 0.7, rtol=1e-6)
  ratios[0] = 0.69  # off the bound, where subtracting μ from log π may round either way
  logprobs = jnp.full(4, -1.0, jnp.float32)
  arguments = logprobs, logprobs - np.log(ratios), np.ones(4, np.float32), np.ones(4, bool)
  np.testing.assert_allclose(dis_policy_loss(*arguments, **REASONING), [0, 0.8, 2, 0], rtol=1e-6)
  np.testing.assert_allclose(mean_loss(*arguments, **REASONING), 0.7, rtol=1e-6)


@pytest.mark.parametrize("extreme", [1000.0, 89.0, -1000.0, np.inf])
def test_extreme_ratios_are_masked_before_exponentiating(extreme):
  """log ρ = [0, 1000]: coefficients [1, 0], not inf * 0."""
  log_ratio = jnp.array([0.0, extreme], jnp.float32)
  loss = lambda logprobs: mean_loss(logprobs, -log_ratio, jnp.ones(2), jnp.ones(2, bool), **REASONING)
  value, grads = jax.value_and_grad(loss)(jnp.zeros(2, jnp.float32))
  np.testing.assert_array_equal(-2 * grads, [1, 0])
  assert np.isfinite(value)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, -9999.0])
def test_unsampled_tokens_cannot_poison(poison):
  """NaN μ, log π and Â outside the mask leave loss and gradients finite, and those gradients exactly 0."""
  mask = np.array([1, 1, 1, 0], bool)
  logprobs = jnp.array([-0.2, -0.3, -0.5, poison], jnp.float32)
  behavior = np.array([-0.1, -0.2, -0.4, poison], np.float32)
  advantages = np.array([1, -1, 2, poison], np.float32)
  loss = lambda x: mean_loss(x, behavior, advantages, mask, **REASONING)
  value, grads = jax.value_and_grad(loss)(logprobs)
  assert np.isfinite(value)
  assert np.isfinite(grads).all()
  assert grads[3] == 0
  assert (grads[:3] != 0).all()


def test_soft_mask_of_log_ratios():
  """0 * NaN: log π [.2,.3,.5,.7], μ [.1,.2,.4,NaN], soft mask [1,.5,.25,0] give [.1,.05,.025,0], gradients finite."""
  soft = np.array([1, 0.5, 0.25, 0], np.float32)
  behavior = np.array([0.1, 0.2, 0.4, np.nan], np.float32)
  weighted = lambda x: soft * log_ratios(x, behavior, soft > 0)
  logprobs = jnp.array([0.2, 0.3, 0.5, 0.7], jnp.float32)
  np.testing.assert_allclose(weighted(logprobs), [0.1, 0.05, 0.025, 0], atol=1e-7)
  np.testing.assert_allclose(jax.grad(lambda x: weighted(x).sum())(logprobs), soft)


def test_nan_evidence_on_a_sampled_token_is_never_trained_and_shows():
  behavior = np.array([0.0, np.nan], np.float32)
  loss = lambda x: mean_loss(x, behavior, jnp.ones(2), jnp.ones(2, bool), **REASONING)
  np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(2, jnp.float32)), [-0.5, 0])
  delta = jnp.abs(log_ratios(jnp.zeros(2), behavior, jnp.ones(2, bool)))  # of which the metric is the mean
  assert np.isnan(delta[1]) and delta[0] == 0


@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 2, 4)])
def test_nothing_sampled(shape):
  """Loss 0, gradients exactly 0."""
  x, empty = jnp.full(shape, -1.0, jnp.float32), jnp.zeros(shape, bool)
  loss = lambda logprobs: mean_loss(logprobs, x * jnp.nan, x, empty, **REASONING)
  value, grads = jax.value_and_grad(loss)(x)
  assert value == 0
  np.testing.assert_array_equal(grads, 0)
  np.testing.assert_array_equal(dis_policy_loss(x, x * jnp.nan, x, empty, **REASONING), 0)


def test_zero_advantage_is_not_a_mask():
  """A sampled token with Â = 0 counts in N."""
  zeros = jnp.zeros(2, jnp.float32)
  loss = lambda x: mean_loss(x, zeros, jnp.array([2.0, 0.0]), jnp.ones(2, bool), **REASONING)
  np.testing.assert_array_equal(jax.grad(loss)(zeros), [-1, 0])


def test_given_denominator_makes_parts_add_up():
  rng = np.random.default_rng(0)
  logprobs, behavior = rng.uniform(-2, 0, (2, 4, 6)).astype(np.float32)
  advantages, mask = rng.normal(size=(4, 6)).astype(np.float32), rng.random((4, 6)) < 0.6
  loss = functools.partial(mean_loss, **REASONING)
  whole = loss(logprobs, behavior, advantages, mask)
  parts = [loss(logprobs[i], behavior[i], advantages[i], mask[i], denominator=int(mask.sum())) for i in range(4)]
  np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)


def softmax_policy(theta, token=0):
  return jax.nn.log_softmax(jnp.stack([theta, jnp.zeros_like(theta)]))[token]


@pytest.mark.parametrize("advantage", [1.0, -0.7])
@pytest.mark.parametrize("theta", [-2.0, -0.5, 0.0, 1.5])
def test_gradient_equals_finite_differences_of_the_importance_weighted_objective(theta, advantage):
  """Our gradient is d/dθ of -ρ(θ)Â, by finite differences; that of f(ρ)Â log π has the wrong sign at p < 1/e."""
  behavior = float(softmax_policy(jnp.float32(theta)))  # on-policy, ρ = 1
  one = jnp.ones((1,), jnp.float32)

  def loss(x):
    return mean_loss(softmax_policy(x) * one, behavior * one, advantage * one, one > 0, **REASONING)

  log_p = lambda x: x - math.log(math.exp(x) + 1)  # in double
  step = 1e-5
  difference = lambda f: (f(theta + step) - f(theta - step)) / (2 * step)
  surrogate = difference(lambda x: -math.exp(log_p(x) - log_p(theta)) * advantage)
  got = float(jax.grad(loss)(jnp.float32(theta)))
  np.testing.assert_allclose(got, surrogate, rtol=1e-4)
  literal = difference(lambda x: -math.exp(log_p(x) - log_p(theta)) * advantage * log_p(x))
  assert (literal * got < 0) == (log_p(theta) < -1)


@pytest.mark.parametrize(
  ("logits", "sampler_temperature", "trainer_temperature", "token", "sampler_logprob", "ratio"),
  [
    ([2, 0], 0.5, 0.5, 0, -0.01815, 1),
    ([2, 1, 0], 0.5, 0.5, 0, -0.14293, 1),
    ([2, 0], 0.7, 1.0, 0, None, 0.931),
    ([2, 0], 0.7, 1.0, 1, None, 2.195),
  ],
)
def test_ratio_audit_of_temperature(logits, sampler_temperature, trainer_temperature, token, sampler_logprob, ratio):
  """The logits are divided, on both sides; on one side only, the ratio is off with zero lag."""
  logits = jnp.array(logits, jnp.float32)
  behavior = jax.nn.log_softmax(logits / sampler_temperature)[token]
  if sampler_logprob is not None:
    np.testing.assert_allclose(behavior, sampler_logprob, atol=1e-5)
  got = jnp.exp(log_ratios(jax.nn.log_softmax(logits / trainer_temperature)[token], behavior, jnp.array(True)))
  np.testing.assert_allclose(got, ratio, atol=1e-3 if ratio != 1 else 0)


def test_ratio_audit_of_top_p():
  """p = [.5, .3, .15, .05], top-p .8: μ = -.4700 over the kept set, ratio .8 at zero lag."""
  behavior = np.float32(math.log(0.5 / 0.8))
  np.testing.assert_allclose(behavior, -0.47, atol=1e-4)
  np.testing.assert_allclose(
    np.exp(log_ratios(jnp.log(jnp.float32(0.5)), jnp.asarray(behavior), jnp.array(True))), 0.8, atol=1e-6
  )


def test_ratios_are_formed_in_fp32():
  """In [8, 16) bf16 is spaced 0.0625, 3 % of a ratio after rounding; what we are given is subtracted in fp32."""
  logprob, behavior = jnp.float32(-10.02), jnp.float32(-10.0)
  np.testing.assert_allclose(log_ratios(logprob, behavior, jnp.array(True)), -0.02, atol=1e-6)
  rounded = log_ratios(logprob.astype(jnp.bfloat16), behavior, jnp.array(True))
  assert rounded.dtype == jnp.float32
  np.testing.assert_allclose(jnp.exp(rounded), 1.0, atol=0.065)
  assert abs(rounded + 0.02) > 0.01
  losses = dis_policy_loss(
    logprob[None].astype(jnp.bfloat16), behavior[None], jnp.ones(1), jnp.ones(1, bool), **REASONING
  )
  assert losses.dtype == jnp.float32


_loss = jax.jit(lambda *args: jax.value_and_grad(lambda x: mean_loss(x, *args[1:], **CODING))(args[0]))


@hypothesis.given(st.integers(0, 2**16), st.integers(1, 12), st.integers(0, 11))
def test_padding_and_order_do_not_matter(seed, count, shift):
  """The same tokens, elsewhere among padding and in another order: the same loss, the gradients move along."""
  rng = np.random.default_rng(seed)
  poison = np.full(24, np.nan, np.float32)
  tokens = rng.uniform(-3, 0, (2, count)).astype(np.float32), rng.normal(size=count).astype(np.float32)
  order = rng.permutation(count)

  def lay_out(start, order):
    where = slice(start, start + count)
    logprobs, behavior, advantages = poison.copy(), poison.copy(), poison.copy()
    logprobs[where], behavior[where], advantages[where] = tokens[0][0][order], tokens[0][1][order], tokens[1][order]
    return _loss(logprobs, behavior, advantages, np.isfinite(logprobs)), where

  (loss, grads), here = lay_out(0, np.arange(count))
  (moved_loss, moved_grads), there = lay_out(shift, order)
  np.testing.assert_allclose(moved_loss, loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(moved_grads[there], grads[here][order], rtol=1e-5)
  assert not moved_grads[~np.isfinite(np.r_[poison[: there.start], np.zeros(count), poison[there.stop :]])].any()
