"""The critic's loss and its heads."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.algorithm.reductions import masked_sum
from sao_jax.algorithm.value_loss import HLGaussHead, ScalarHead, ValueHead, make_value_head, value_loss
from sao_jax.config import AlgorithmConfig


def head_loss(head, outputs, targets, mask, old_values=None):
  """The sum of the head's token losses over the sampled tokens, divided by their number."""
  losses = head.losses(outputs, targets, mask, old_values)
  assert losses.shape == mask.shape and losses.dtype == jnp.float32
  return masked_sum(losses, mask) / max(int(np.sum(mask)), 1)


def test_global_denominator():
  """Squared errors [1,1,1,1 | 9,9] in two micro-batches: 22/6 = 3.6667, not (1 + 9)/2 and not 1 + 9."""
  errors = np.sqrt(np.array([1, 1, 1, 1, 9, 9], np.float32))
  zeros, mask = np.zeros(6, np.float32), np.ones(6, bool)
  parts = [masked_sum(value_loss(errors[s], zeros[s], mask[s]), mask[s]) / 6 for s in (slice(0, 4), slice(4, 6))]
  np.testing.assert_allclose(sum(parts), 22 / 6, rtol=1e-6)
  np.testing.assert_allclose(value_loss(errors, zeros, mask), [1, 1, 1, 1, 9, 9], rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("head", [ScalarHead(), ScalarHead(clip=0.2), HLGaussHead(11, 0.0, 1.0)])
def test_unsampled_tokens_cannot_poison(head, poison):
  outputs = jnp.ones((3, head.num_outputs), jnp.float32).at[2].set(poison)
  targets, old = jnp.array([1.0, 0.0, poison]), jnp.array([0.5, 0.5, poison])
  mask = jnp.array([True, True, False])
  loss = lambda x: head_loss(head, x, targets, mask, old)
  value, grads = jax.value_and_grad(loss)(outputs)
  assert np.isfinite(value)
  assert np.isfinite(grads).all()
  assert not grads[2].any()
  assert head.values(outputs).shape == (3,)


@pytest.mark.parametrize("head", [ScalarHead(), ScalarHead(clip=0.2), HLGaussHead(11, 0.0, 1.0)])
def test_nothing_sampled(head):
  outputs, x, empty = jnp.ones((2, 3, head.num_outputs)), jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
  value, grads = jax.value_and_grad(lambda y: head_loss(head, y, x, empty, x))(outputs)
  assert value == 0
  assert not grads.any()


@pytest.mark.parametrize(
  ("value", "old", "target", "loss", "gradient"),
  [
    (0.9, 0.5, 1.0, 0.09, 0.0),  # clipped to 0.7: the larger error has no gradient
    (0.9, 0.5, 0.0, 0.81, 1.8),  # moved away from the target: full gradient
    (0.6, 0.5, 1.0, 0.16, -0.8),  # inside the range: as without the clip
    (0.5, 0.5, 1.0, 0.25, -1.0),  # the first update starts at the old value
  ],
)
def test_ppo_value_clip(value, old, target, loss, gradient):
  token_losses = lambda v: value_loss(v, jnp.array([target]), jnp.array([True]), old_values=jnp.array([old]), clip=0.2)
  fn = lambda v: token_losses(v)[0]  # there is one token
  got, grads = jax.value_and_grad(fn)(jnp.array([value]))
  np.testing.assert_allclose(got, loss, rtol=1e-5)
  np.testing.assert_allclose(grads, [gradient], rtol=1e-5, atol=1e-6)


def test_zero_head_is_value_zero():
  np.testing.assert_array_equal(ScalarHead().values(jnp.zeros((4, 1))), 0)
  np.testing.assert_allclose(HLGaussHead(51, -1.0, 3.0).values(jnp.zeros((4, 51))), 1.0, atol=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 100.0)])
@pytest.mark.parametrize("bins", [11, 51])
def test_hl_gauss_targets_have_the_right_mean(low, high, bins):
  """Also at the ends of the range, where a truncated Gaussian would be biased inwards; outside it they are clipped."""
  head = HLGaussHead(bins, low, high)
  targets = jnp.linspace(low, high, 9)
  probabilities = head.target_probabilities(targets)
  np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
  np.testing.assert_allclose(head.values(jnp.log(probabilities + 1e-30)), targets, atol=3e-3 * (high - low) * 11 / bins)
  outside = head.target_probabilities(jnp.array([low - 5, high + 5]))
  np.testing.assert_allclose(outside, probabilities[jnp.array([0, -1])], atol=1e-6)


def test_hl_gauss_loss_is_least_at_the_target():
  head = HLGaussHead(21, 0.0, 1.0)
  target, mask = jnp.array([0.3]), jnp.array([True])
  fit = jnp.log(head.target_probabilities(target) + 1e-30)
  loss, grads = jax.value_and_grad(lambda x: head_loss(head, x, target, mask))(fit)
  np.testing.assert_allclose(grads, 0, atol=1e-5)
  assert loss < head_loss(head, jnp.log(head.target_probabilities(target + 0.1) + 1e-30), target, mask)


def test_hl_gauss_losses_of_rows_are_those_of_each_row():
  head, rows = HLGaussHead(5, 0.0, 1.0), np.random.default_rng(0)
  outputs = jnp.asarray(rows.normal(size=(2, 3, 5)), jnp.float32)
  targets, mask = jnp.asarray(rows.random((2, 3)), jnp.float32), jnp.array([[True, True, False], [True, False, True]])
  each = [head.losses(*parts) for parts in zip(outputs, targets, mask, strict=True)]
  np.testing.assert_allclose(head.losses(outputs, targets, mask), jnp.stack(each), rtol=1e-6)


def test_returns_outside_the_range_are_counted():
  targets = jnp.array([-0.1, 0.0, 0.4, 1.0, 1.5, jnp.nan], jnp.float32)
  assert HLGaussHead(11, 0.0, 1.0).clips(targets).tolist() == [True, False, False, False, True, False]
  assert not ScalarHead().clips(targets).any()


@pytest.mark.parametrize("head", [ScalarHead, HLGaussHead])
@pytest.mark.parametrize("method", ["values", "clips", "losses"])
def test_heads_are_annotated_like_their_protocol(head, method):
  """Without annotations the type checker of the tests would pass them over."""
  assert inspect.signature(getattr(head, method)) == inspect.signature(getattr(ValueHead, method))


def test_make_value_head():
  assert make_value_head(AlgorithmConfig()) == ScalarHead()
  assert make_value_head(AlgorithmConfig(value_clip=0.2)) == ScalarHead(0.2)
  assert make_value_head(AlgorithmConfig(value_head="hl_gauss", value_max=2.0)) == HLGaussHead(51, 0.0, 2.0)
