"""The experts of few tokens, all at once: the same sums as one group after the other, whatever the routing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models.batched_experts import batched_experts, expert_rows

TOKENS, ACTIVE, EXPERTS, DIM, WIDTH = 16, 2, 8, 8, 12


def layer():
  keys = jax.random.split(jax.random.key(0), 5)
  shapes = {"gate": (EXPERTS, DIM, WIDTH), "up": (EXPERTS, DIM, WIDTH), "down": (EXPERTS, WIDTH, DIM)}
  params = {name: 0.3 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys)}
  return params, jax.random.normal(keys[3], (TOKENS, DIM)), jax.random.uniform(keys[4], (TOKENS, ACTIVE))


def by_hand(params, x, weights, experts):
  gate, up, down = (np.asarray(params[name], np.float64) for name in ("gate", "up", "down"))
  out = np.zeros((TOKENS, DIM))
  for token, choice in np.ndindex(experts.shape):
    expert, row = experts[token, choice], np.asarray(x[token], np.float64)
    inner = row @ gate[expert]
    hidden = inner / (1 + np.exp(-inner)) * (row @ up[expert])
    out[token] += float(weights[token, choice]) * (hidden @ down[expert])
  return out


def even():
  return np.stack([np.arange(TOKENS) % EXPERTS, (np.arange(TOKENS) + 3) % EXPERTS], axis=1)


def crowded():
  """All tokens choose expert 5: more than a round has rows for."""
  return np.stack([np.full(TOKENS, 5), np.arange(TOKENS) % 5], axis=1)


compute = jax.jit(batched_experts)


@pytest.mark.parametrize("routing", [even, crowded])
def test_equals_a_loop_over_the_pairs(routing):
  assert expert_rows(TOKENS, ACTIVE, EXPERTS) == 8 < TOKENS
  params, x, weights = layer()
  experts = routing()
  out = compute(params, x, weights, jnp.asarray(experts, jnp.int32))
  np.testing.assert_allclose(out, by_hand(params, x, weights, experts), atol=1e-5)


@pytest.mark.parametrize("routing", [even, crowded])
def test_a_token_depends_on_no_other(routing):
  params, x, weights = layer()
  experts = jnp.asarray(routing(), jnp.int32)
  out, broken = (compute(params, states, weights, experts) for states in (x, x.at[3].set(jnp.nan)))
  others = np.arange(TOKENS) != 3
  np.testing.assert_array_equal(out[others], broken[others])
  assert np.isnan(broken[3]).all()
