"""The sigmoid router: chosen with the bias, weighted without it, within the best groups."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from sao_jax.config import ModelConfig
from sao_jax.models import router
from sao_jax.models.moe import moe_feed_forward
from sao_jax.parallel.layout import ONE_DEVICE

CONFIG = ModelConfig(router="sigmoid", num_experts=6, num_experts_per_token=2, d_model=6)
GROUPS = dataclasses.replace(CONFIG, num_expert_groups=3, num_groups_per_token=1)


def logits_of(scores):
  return np.log(scores) - np.log1p(-np.asarray(scores))


def route(config, scores, bias):
  """Routes one token whose scores are these, through an identity router."""
  x = jnp.asarray([logits_of(scores)], jnp.float32)
  params = {"router": jnp.eye(6, dtype=jnp.float32), "correction_bias": jnp.asarray(bias, jnp.float32)}
  routing = jaxtyped(router.route, typechecker=beartype)(params, x, config)
  return dict(zip(routing.experts[0].tolist(), routing.weights[0].tolist(), strict=True))


SCORES = [0.9, 0.1, 0.5, 0.6, 0.2, 0.3]


def test_the_bias_chooses_and_the_score_weighs():
  assert route(CONFIG, SCORES, np.zeros(6)) == pytest.approx({0: 0.6, 3: 0.4})
  assert route(CONFIG, SCORES, [-1, 0, 0, 0, 0.5, 0]) == pytest.approx({4: 0.25, 3: 0.75})
  raw = dataclasses.replace(CONFIG, renormalize_router=False, routed_scaling=2.0)
  assert route(raw, SCORES, np.zeros(6)) == pytest.approx({0: 1.8, 3: 1.2})


def test_groups():
  """Groups (0, 1), (2, 3), (4, 5) by the sum of their two best: 1.0, 1.1, 0.5; with the bias 1.0, 1.1, 1.5."""
  assert set(route(GROUPS, SCORES, np.zeros(6))) == {2, 3}
  assert set(route(GROUPS, SCORES, [0, 0, 0, 0, 0.5, 0.5])) == {4, 5}
  two = dataclasses.replace(GROUPS, num_groups_per_token=2)
  assert set(route(two, SCORES, np.zeros(6))) == {0, 3}


def test_equal_scores_go_to_the_lower_id():
  assert list(route(CONFIG, [0.5] * 6, np.zeros(6))) == [0, 1]
  assert set(route(GROUPS, [0.5] * 6, np.zeros(6))) == {0, 1}


def test_gradients():
  """The correction bias has none, the router has; nothing is NaN where a group is masked out."""
  rng = np.random.default_rng(0)
  config = dataclasses.replace(GROUPS, d_ff_expert=4)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  params = {"router": draw(6, 6), "correction_bias": 0.1 * draw(6), "gate": draw(6, 6, 4), "up": draw(6, 6, 4)}
  params["down"] = draw(6, 4, 6)
  x = draw(1, 5, 6)
  loss = lambda params: jnp.sum(moe_feed_forward(params, x, config, ONE_DEVICE)[0] ** 2)
  grads = jax.jit(jax.grad(loss))(params)
  assert not np.any(grads["correction_bias"])
  assert all(np.all(np.isfinite(leaf)) for leaf in grads.values())
  assert np.abs(grads["router"]).max() > 0


def test_scores_of_chosen_experts_have_a_gradient_without_a_scatter():
  """And an expert that there is not has no score, rather than one of its own."""
  params = {"router": jnp.eye(6, dtype=jnp.float32), "correction_bias": jnp.zeros(6)}
  x = jnp.asarray([logits_of(SCORES)], jnp.float32)
  loss = lambda x, replayed: jnp.sum(router.route(params, x, CONFIG, replayed).weights[0, 0])
  gradient = jax.jit(jax.grad(loss)).trace(x, jnp.asarray([[0, 3]]))
  assert "scatter" not in str(gradient.jaxpr)
  # Of s / (s + t) by the logit of s: s (1 - s) t / (s + t)²; for the other logit the same with -t (1 - t) s.
  expected = np.array([0.9 * 0.1 * 0.6, 0, 0, -0.6 * 0.4 * 0.9, 0, 0]) / 1.5**2
  np.testing.assert_allclose(gradient.lower().compile()(x, jnp.asarray([[0, 3]]))[0], expected, rtol=1e-5, atol=1e-7)
  assert np.isnan(router.route(params, x, CONFIG, jnp.asarray([[6, 0]])).weights).all()
