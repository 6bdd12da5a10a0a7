"""A bounded buffer of (token, expert) pairs: any routing is computed exactly, in as many rounds as it takes."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import expert_buffer
from sao_jax.models.expert_buffer import Rows, buffer_rows, buffered_experts, buffered_gradient, collect, spread
from sao_jax.models.experts import expert_feed_forward

N, K, D, F, E = 12, 3, 5, 4, 3  # of which three experts live here; ids beyond are of other devices


def operands(seed=0):
  rng = np.random.default_rng(seed)
  shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
  params = {name: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32) for name, shape in shapes.items()}
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return params, normal(N, D), normal(N, K), normal(N, D)


@functools.partial(jax.jit, static_argnums=(1, 2))
def buffered(experts, rows, implementation):
  params, x, weights, out_grad = operands()
  static = {"rows": rows, "implementation": implementation}
  out, computed = buffered_experts(params, x, weights, experts, **static)
  return out, buffered_gradient(params, x, weights, experts, out_grad, **static), computed


@jax.jit
def at_once(experts):
  params, x, weights, out_grad = operands()
  run = functools.partial(expert_feed_forward, experts=experts, implementation="blocked")
  out, vjp = jax.vjp(run, params, x, weights)
  return out, vjp(out_grad)


def check(experts, rows, implementation):
  out, gradients, computed = buffered(jnp.asarray(experts, jnp.int32), rows, implementation)
  expected = at_once(jnp.asarray(experts, jnp.int32))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (out, gradients), expected)
  here = (np.asarray(experts) >= 0) & (np.asarray(experts) < E)
  np.testing.assert_array_equal(computed, here.sum(1))


@pytest.mark.parametrize(
  ("rows", "implementation"), [(8, "blocked"), (8, "ragged_dot"), (1, "blocked"), (36, "blocked")]
)
@hypothesis.given(
  experts=st.lists(st.lists(st.integers(-2, E + 2), min_size=K, max_size=K), min_size=N, max_size=N).map(np.array)
)
@hypothesis.example(experts=np.full((N, K), 1))  # all tokens to one expert, by all their choices
@hypothesis.example(experts=np.full((N, K), -1))  # nothing lives here
@hypothesis.example(experts=np.arange(N * K).reshape(N, K) % E)  # an even load, four times the share
def test_any_routing_is_exact(rows, implementation, experts):
  check(experts, rows, implementation)


def test_the_rounds_that_are_needed_and_no_more(monkeypatch):
  """An even load needs one buffer; the loop goes on only where there is more."""
  starts = []
  lay_out = expert_buffer._lay_out

  def recorded(order, places, ends, start, rows):
    jax.debug.callback(lambda start: starts.append(int(start)), start)
    return lay_out(order, places, ends, start, rows)

  monkeypatch.setattr(expert_buffer, "_lay_out", recorded)
  params, x, weights, _ = operands()
  for load, rounds in ((8, 1), (9, 2), (36, 5), (0, 0)):
    experts = jnp.where(jnp.arange(N * K).reshape(N, K) < load, 1, -1)
    starts.clear()
    jax.block_until_ready(buffered_experts(params, x, weights, experts, rows=8, implementation="blocked"))
    jax.effects_barrier()
    assert sorted(starts) == [8 * i for i in range(rounds)]


def test_a_buffer_is_at_most_half_above_the_even_share(monkeypatch):
  assert buffer_rows(32_768 * 4, 4) == 49_152  # 1.5 · 32,768 pairs
  assert buffer_rows(100_000, 8) == 18_432  # whole tiles of 512 rows, rounded down
  assert buffer_rows(32_768, 1) == 32_768  # all experts live here: all pairs do
  assert buffer_rows(2048, 4) == 2048  # few pairs are laid out all at once
  monkeypatch.setattr(expert_buffer, "FEW_PAIRS", 0)
  assert buffer_rows(64, 8) == 8 and buffer_rows(4, 4) == 4


def test_rows_go_to_their_tokens_and_back():
  """Five rows of three tokens, the fourth of which is unused, by hand; each direction is the other's transpose."""
  own = Rows(
    pairs=jnp.asarray([7, 0, 2, 5, 1]),  # of tokens 3, 0, 1, 2, 0 with two choices each
    used=jnp.asarray([True, True, True, False, True]),
    group_sizes=jnp.asarray([4]),
    places=jnp.asarray([[1, 2, -1, -1], [4, -1, -1, 0]]),  # of the first choices, of the second ones
  )
  rows, x = jnp.asarray([[1.0], [2.0], [4.0], [8.0], [16.0]]), jnp.asarray([[1.0], [2.0], [3.0], [4.0]])
  out, to_rows = jax.vjp(lambda rows: collect(rows, own, 2), rows)
  back, to_tokens = jax.vjp(lambda x: spread(x, own, 2), x)
  np.testing.assert_array_equal(out, [[18.0], [4.0], [0.0], [1.0]])
  np.testing.assert_array_equal(back, [[4.0], [1.0], [2.0], [0.0], [1.0]])
  np.testing.assert_array_equal(to_rows(x)[0], back)
  np.testing.assert_array_equal(to_tokens(rows)[0], out)
