"""Experts that are given instead of chosen: whose weights they get, where gradients go, and what is counted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys.transformer_toy import IDS, POSITIONS, SEGMENTS, random_params

from sao_jax.config import ModelConfig
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.moe import moe_feed_forward
from sao_jax.models.policy import count_routed
from sao_jax.models.router import route
from sao_jax.models.transformer import trunk
from sao_jax.parallel.layout import ONE_DEVICE
from sao_jax.types import TrajectoryBatch

SOFTMAX = ModelConfig(d_model=6, num_experts=4, num_experts_per_token=2, d_ff_expert=5)
SIGMOID = dataclasses.replace(SOFTMAX, router="sigmoid", routed_scaling=1.5)
RAW = dataclasses.replace(SOFTMAX, renormalize_router=False)


def layer_params(seed=0):
  rng = np.random.default_rng(seed)
  shapes = {"router": (6, 4), "correction_bias": (4,), "gate": (4, 6, 5), "up": (4, 6, 5), "down": (4, 5, 6)}
  return {name: jnp.asarray(rng.normal(0, 0.7, shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID, RAW], ids=["softmax", "sigmoid", "raw weights"])
def test_given_experts_by_hand(config):
  """One token at a time, in float64: this router's own scores of the given experts, and nothing of the others."""
  params = layer_params()
  x = np.random.default_rng(1).normal(size=(1, 3, 6)).astype(np.float32)
  given = np.array([[[0, 3], [-1, -1], [2, 1]]], np.int16)
  out, routed = jax.jit(lambda p, x: moe_feed_forward(p, x, config, ONE_DEVICE, given))(params, x)
  wide = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
  for token, experts in enumerate(given[0]):
    logits = np.float64(x[0, token]) @ wide["router"]
    scores = np.exp(logits) / np.exp(logits).sum() if config.router == "softmax" else 1 / (1 + np.exp(-logits))
    preferred = np.argsort(-(scores + (wide["correction_bias"] if config.router == "sigmoid" else 0)))[:2]
    used = preferred if experts[0] < 0 else experts
    weights = scores[used] / (scores[used].sum() if config.renormalize_router else 1) * config.routed_scaling
    expected = np.zeros(6)
    for expert, weight in zip(used, weights, strict=True):
      gate, up = x[0, token] @ wide["gate"][expert], x[0, token] @ wide["up"][expert]
      expected += weight * (gate / (1 + np.exp(-gate)) * up) @ wide["down"][expert]
    np.testing.assert_allclose(out[0, token], expected, rtol=1e-4, atol=1e-5)
    assert routed.experts[0, token].tolist() == list(used)
    assert routed.agreeing[0, token] == len(set(used) & set(preferred))
    p = scores / scores.sum()
    np.testing.assert_allclose(routed.entropy[0, token], -(p * np.log(p)).sum(), rtol=1e-5)
  assert routed.computed.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_its_own_choice_replayed_changes_nothing(config):
  """Neither the result nor any gradient; with other experts the router still learns, through their weights."""
  params, x = layer_params(), jnp.asarray(np.random.default_rng(2).normal(size=(1, 7, 6)), jnp.float32)

  def loss(params, replayed):
    out, routed = moe_feed_forward(params, x, config, ONE_DEVICE, replayed)
    return jnp.sum(jnp.sin(out)), routed.experts

  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (expected, experts), expected_grads = step(params, None)
  (value, again), grads = step(params, experts.astype(jnp.int16))
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_array_equal(again, experts)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), grads, expected_grads)
  (other, _), grads = step(params, (3 - experts).astype(jnp.int16))
  assert abs(other - expected) > 1e-3 and np.abs(grads["router"]).max() > 1e-3
  assert not np.any(grads["correction_bias"])


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_replayed_experts_whose_scores_underflow(config):
  """Their weights still add up: 1/4 and 3/4 of the factor; the gradient is finite, and that of a softmax over both."""
  logits = jnp.asarray([200.0, 199.0, -200.0, -200.0 + np.log(3.0)], jnp.float32)
  params = layer_params() | {"router": jnp.zeros((6, 4), jnp.float32).at[0].set(logits)}
  x = jnp.ones((1, 6), jnp.float32)
  value = lambda params: route(params, x, config, jnp.asarray([[2, 3]], jnp.int16)).weights[0]
  np.testing.assert_allclose(value(params), config.routed_scaling * np.array([0.25, 0.75]), rtol=1e-4)
  grads = jax.grad(lambda params: value(params)[0])(params)["router"]
  expected = config.routed_scaling * 3 / 16 * np.array([0, 0, 1, -1])
  np.testing.assert_allclose(grads, np.tile(expected, (6, 1)), rtol=1e-4)


def test_entropy_of_even_and_certain_routers():
  config = dataclasses.replace(SIGMOID, num_experts=6)
  even = {"router": jnp.zeros((6, 6), jnp.float32), "correction_bias": jnp.zeros((6,), jnp.float32)}
  certain = even | {"router": even["router"].at[0].set(jnp.asarray([300.0] + [-300.0] * 5))}
  for settings in (config, dataclasses.replace(config, router="softmax", routed_scaling=1.0)):
    entropy = [route(params, jnp.ones((1, 6), jnp.float32), settings).entropy[0] for params in (even, certain)]
    np.testing.assert_allclose(entropy, [np.log(6), 0], atol=1e-6)


TRUNK = ModelConfig(
  vocab_size=16,
  num_layers=3,
  d_model=8,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  d_ff=8,
  num_experts=4,
  d_ff_expert=8,
  num_dense_layers=1,
)


def test_layers_get_their_own_experts_and_padding_is_not_counted():
  """The second of three layers is the first with experts; statistics are sums over the tokens of each row."""
  params = random_params(TRUNK)
  given = np.random.default_rng(0).permuted(np.tile(np.arange(4), (2, 6, 2, 1)), axis=-1)[..., :2].astype(np.int16)
  given[0, 1] = given[1, 5] = -1
  run = jax.jit(
    lambda params, given: trunk(
      params, TRUNK, IDS, POSITIONS, attend=packed_attend(jnp.asarray(SEGMENTS)), routed_experts=given
    )[2]
  )
  routed = run(params, given)
  known = given[..., 0] >= 0
  np.testing.assert_array_equal(np.moveaxis(routed.experts, 0, 2)[known], given[known])
  own = run(params, None)
  np.testing.assert_array_equal(own.agreeing, np.full((2, 2, 6), 2))
  np.testing.assert_array_equal(run(params, jnp.moveaxis(own.experts, 0, 2)).experts, own.experts)

  zeros = np.zeros((2, 6), np.float32)
  fields = dict.fromkeys(("behavior_logprobs", "rewards"), zeros) | {"policy_version": zeros.astype(np.int32)}
  fields |= dict.fromkeys(("action_mask", "loss_mask", "truncated"), zeros.astype(bool))
  batch = TrajectoryBatch(IDS, SEGMENTS, SEGMENTS, POSITIONS, **fields, routed_experts=jnp.asarray(given))
  counted = count_routed(routed, batch, 4)
  assert counted.tokens.tolist() == [5, 6]  # row 0 ends with padding
  for layer in range(2):
    for row in range(2):
      real = SEGMENTS[row] > 0
      np.testing.assert_array_equal(
        counted.load[row, layer], np.bincount(routed.experts[layer, row, real].ravel(), minlength=4)
      )
      assert counted.replayed[row, layer] == 2 * (known[row, real, layer].sum())
      assert counted.agreeing[row, layer] == routed.agreeing[layer, row][real & known[row, :, layer]].sum()
      np.testing.assert_allclose(counted.entropy[row, layer], routed.entropy[layer, row][real].sum(), rtol=1e-6)
  assert not counted.dropped.any()
  nothing = count_routed(own, batch.replace(routed_experts=None), 4)
  assert not nothing.replayed.any() and not nothing.agreeing.any()
  lost = routed._replace(computed=routed.computed.at[1, 0, 5].set(1))  # of a padding token, whose loss is a loss too
  assert count_routed(lost, batch, 4).dropped.tolist() == [[0, 1], [0, 0]]
