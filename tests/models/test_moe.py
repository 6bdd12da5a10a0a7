"""Routing and the grouped matrix product: exact for every split into groups, and never a dropped token."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from sao_jax.config import ModelConfig
from sao_jax.models import grouped_matmul as grouped_matmul_module
from sao_jax.models.experts import expert_feed_forward, permute, sort_by_expert
from sao_jax.models.grouped_matmul import choose_implementation, grouped_map, grouped_matmul, megablox_matmul
from sao_jax.models.linear import feed_forward
from sao_jax.models.router import route

M, D, F, E = 40, 6, 5, 4


@functools.partial(jax.jit, static_argnums=4)
def value_and_gradients(lhs, rhs, group_sizes, out_grad, implementation):
  out, vjp = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, group_sizes, implementation), lhs, rhs)
  return out, *vjp(out_grad)


def loop(lhs, rhs, group_sizes, out_grad):
  """The definition: one expert after the other."""
  out, lhs_grad, rhs_grad = np.zeros((len(lhs), rhs.shape[2])), np.zeros(lhs.shape), np.zeros(rhs.shape)
  start = 0
  for e, size in enumerate(group_sizes):
    rows = slice(start, start + size)
    out[rows], lhs_grad[rows], rhs_grad[e] = lhs[rows] @ rhs[e], out_grad[rows] @ rhs[e].T, lhs[rows].T @ out_grad[rows]
    start += size
  return out, lhs_grad, rhs_grad


def operands(seed, rows=M, inner=D, width=F):
  rng = np.random.default_rng(seed)
  shapes = ((rows, inner), (E, inner, width), (rows, width))
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@st.composite
def splits(draw):
  """Group sizes with empty groups and with rows that belong to nobody."""
  cuts = sorted(draw(st.lists(st.integers(0, M), min_size=E, max_size=E)))
  return np.diff([0, *cuts]).astype(np.int32)


@pytest.mark.parametrize("implementation", ["blocked", "ragged_dot"])
@hypothesis.given(group_sizes=splits())
@hypothesis.example(group_sizes=np.array([0, 0, 0, 0], np.int32))
@hypothesis.example(group_sizes=np.array([0, M, 0, 0], np.int32))
@hypothesis.example(group_sizes=np.array([1, 9, 0, 30], np.int32))
def test_grouped_matmul_equals_the_loop(implementation, group_sizes):
  lhs, rhs, out_grad = operands(int(group_sizes[0]))
  got = value_and_gradients(lhs, rhs, group_sizes, out_grad, implementation)
  for a, b in zip(got, loop(lhs, rhs, group_sizes, out_grad)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("inner", "width"), [(128, 256), (320, 192)])
def test_megablox_kernel_equals_the_loop(monkeypatch, inner, width):
  """The TPU kernel, interpreted: rows are padded to its tile, rows of nobody are undefined and masked by the caller.

  Its gradient swaps the two widths but not their tiles, so each is tiled as the other one too, also where a tile is
  larger than the width or does not divide it.
  """
  monkeypatch.setattr(grouped_matmul_module, "MEGABLOX_TILE", (128, 256, 256))
  lhs, rhs, out_grad = operands(0, inner=inner, width=width)
  group_sizes = np.array([7, 0, 20, 13], np.int32)
  out, vjp = jax.vjp(lambda a, b: megablox_matmul(a, b, group_sizes, interpret=True), lhs, rhs)
  for a, b in zip((out, *vjp(jnp.asarray(out_grad))), loop(lhs, rhs, group_sizes, out_grad)):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("implementation", ["blocked", "ragged_dot"])
def test_matrices_of_one_layer_among_all(implementation):
  """A layer's matrices are a contiguous range of the stack of all layers; nothing else of it is read."""
  lhs, rhs, _ = map(jnp.asarray, operands(0))
  group_sizes = jnp.asarray([7, 0, 20, 13], jnp.int32)
  stack = jnp.concatenate([jnp.full_like(rhs, jnp.nan), rhs, jnp.full_like(rhs, jnp.nan)])
  run = jax.jit(lambda first: grouped_matmul(lhs, stack, group_sizes, implementation, first))
  expected = grouped_matmul(lhs, rhs, group_sizes, implementation)
  np.testing.assert_allclose(run(jnp.int32(E)), expected, rtol=1e-6, atol=1e-6)


def test_the_kernel_reads_one_layer_among_all(monkeypatch):
  monkeypatch.setattr(grouped_matmul_module, "MEGABLOX_TILE", (128, 256, 256))
  lhs, rhs, out_grad = operands(0, inner=128, width=128)
  group_sizes = jnp.asarray([7, 0, 20, 13], jnp.int32)
  stack = jnp.concatenate([jnp.full_like(rhs, jnp.nan), rhs, jnp.full_like(rhs, jnp.nan)])
  run = jax.jit(lambda first: megablox_matmul(lhs, stack, group_sizes, first, interpret=True))
  np.testing.assert_allclose(run(jnp.int32(E)), loop(lhs, rhs, group_sizes, out_grad)[0], rtol=1e-3, atol=1e-3)


def test_grouped_map_of_a_nonlinear_function():
  rng = np.random.default_rng(0)
  shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
  params = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
  rows, group_sizes = rng.normal(size=(M, D)).astype(np.float32), np.array([17, 0, 3, 15], np.int32)

  def loop_map(params, rows):
    ends = np.cumsum(group_sizes)
    parts = [
      feed_forward({n: p[e] for n, p in params.items()}, rows[ends[e] - group_sizes[e] : ends[e]]) for e in range(E)
    ]
    return jnp.concatenate([*parts, jnp.zeros((M - ends[-1], D), jnp.float32)])

  def run(fn):
    return jax.jit(jax.value_and_grad(lambda p, r: jnp.sum(jnp.sin(fn(p, r))), argnums=(0, 1)))(params, rows)

  blocked = run(lambda p, r: grouped_map(feed_forward, p, r, jnp.asarray(group_sizes)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), blocked, run(loop_map))


@pytest.mark.parametrize("num_ids", [5, 2**27], ids=["keys of 32 bits", "keys that need more"])
def test_sort_by_expert_is_stable(num_ids):
  ids = np.random.default_rng(0).integers(0, 5, 50).astype(np.int32)
  order, inverse = sort_by_expert(jnp.asarray(ids), num_ids)
  np.testing.assert_array_equal(order, np.argsort(ids, kind="stable"))
  np.testing.assert_array_equal(order[inverse], np.arange(50))


def test_permute_is_its_own_kind_of_gather():
  order = jnp.asarray([2, 0, 3, 1], jnp.int32)
  rows = jnp.arange(8, dtype=jnp.float32).reshape(4, 2)
  weights = jnp.arange(8, dtype=jnp.float32).reshape(4, 2) ** 2
  out, vjp = jax.vjp(lambda rows: permute(rows, order, jnp.argsort(order)), rows)
  expected, expected_vjp = jax.vjp(lambda rows: rows[order], rows)
  np.testing.assert_array_equal(out, expected)
  np.testing.assert_array_equal(vjp(weights)[0], expected_vjp(weights)[0])


def test_ties_go_to_the_lower_expert():
  config = ModelConfig(num_experts=5, num_experts_per_token=2)
  x, params = jnp.ones((3, 2), jnp.float32), {"router": jnp.zeros((2, 5), jnp.float32)}
  routing = jaxtyped(typechecker=beartype)(route)(params, x, config)
  assert routing.experts.tolist() == [[0, 1]] * 3
  np.testing.assert_allclose(routing.weights, np.full((3, 2), 0.5))
  raw = route(params, x, dataclasses.replace(config, renormalize_router=False))
  np.testing.assert_allclose(raw.weights, np.full((3, 2), 0.2), rtol=1e-6)


def test_router_is_fp32_for_bf16_activations():
  x = jnp.ones((1, 1), jnp.bfloat16)
  params = {"router": jnp.asarray([[1.0, 1.0005, 0.5]], jnp.float32)}  # equal in bf16
  routing = route(params, x, ModelConfig(num_experts=3, num_experts_per_token=1))
  assert routing.experts.tolist() == [[1]] and routing.weights.dtype == jnp.float32


def test_all_tokens_to_one_expert_and_ids_of_other_devices():
  """No capacity: however uneven the routing, every token is computed; experts that live elsewhere add nothing."""
  rng = np.random.default_rng(1)
  shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
  params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
  x = jnp.asarray(rng.normal(size=(9, D)), jnp.float32)
  ones = jnp.ones((9, 1), jnp.float32)
  one = feed_forward({name: p[2] for name, p in params.items()}, x)
  apply = functools.partial(expert_feed_forward, params, x, ones, implementation="blocked")
  np.testing.assert_allclose(apply(jnp.full((9, 1), 2, jnp.int32)), one, rtol=1e-4, atol=1e-5)
  mixed = jnp.asarray([[2], [-1], [7], [4]] * 2 + [[2]], jnp.int32)
  expected = jnp.where(mixed == 2, one, 0)
  np.testing.assert_allclose(apply(mixed), expected, rtol=1e-4, atol=1e-5)


def test_implementation_by_platform():
  assert choose_implementation("auto", "tpu") == "megablox" and choose_implementation("auto", "cpu") == "blocked"
  assert choose_implementation("auto") == "blocked"


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_fewer_rows_than_groups(num_rows):
  """One slot that decodes with more experts than it chooses."""
  rng = np.random.default_rng(0)
  rows = jnp.asarray(rng.standard_normal((num_rows, D)), jnp.float32)
  weights = jnp.asarray(rng.standard_normal((8, D, F)), jnp.float32)
  sizes = np.zeros(8, np.int32)
  sizes[5] = num_rows
  out = grouped_map(lambda weight, rows: jnp.dot(rows, weight), weights, rows, jnp.asarray(sizes))
  np.testing.assert_allclose(out, np.asarray(rows) @ np.asarray(weights[5]), rtol=1e-5)
