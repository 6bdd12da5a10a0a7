"""Attention over packed rows in blocks equals the plain formula with a mask, on one device and on many."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.config import MeshConfig
from sao_jax.models.attention.blockwise import blockwise_attention
from sao_jax.models.attention.packed import packed_attention
from sao_jax.models.attention.shards import query_order
from sao_jax.models.attention.short_rows import query_blocks
from sao_jax.parallel.layout import AxisRules, Layout
from sao_jax.parallel.mesh import make_mesh

LENGTH, HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 22, 4, 2, 6, 5


def naive(q, k, v, segments, scale):
  """Loops over rows and heads; softmax over the tokens of the same segment up to the query's own."""
  group = q.shape[2] // k.shape[2]
  rows = []
  for row in range(q.shape[0]):
    index = np.arange(q.shape[1])
    mask = (segments[row][:, None] == segments[row]) & (index[:, None] >= index)
    heads = []
    for head in range(q.shape[2]):
      scores = jnp.where(mask, q[row, :, head] @ k[row, :, head // group].T * scale, -jnp.inf)
      heads.append(jax.nn.softmax(scores, axis=-1) @ v[row, :, head // group])
    rows.append(jnp.stack(heads, axis=1))
  return jnp.where((segments > 0)[..., None, None], jnp.stack(rows), 0)


def arrays(rows=2, length=LENGTH, heads=HEADS, kv_heads=KV_HEADS, seed=0):
  """Queries, keys and values."""
  rng = np.random.default_rng(seed)
  shapes = ((heads, WIDTH), (kv_heads, WIDTH), (kv_heads, VALUE_WIDTH))
  return [jnp.asarray(rng.normal(size=(rows, length, *shape)), jnp.float32) for shape in shapes]


def output_and_gradients(attention):
  """Jitted (q, k, v, ...) -> the output, and the gradients of a sum that tells its entries apart."""

  def value(q, k, v, *others):
    out = attention(q, k, v, *others).astype(jnp.float32)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), out

  return jax.jit(jax.grad(value, argnums=(0, 1, 2), has_aux=True))


def assert_close(got, expected, tolerance=2e-5):
  def compare(a, b):
    np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=tolerance, atol=tolerance)

  jax.tree.map(compare, got, expected)


@functools.cache
def compiled(block, dtype):
  def attention(q, k, v, segments):
    real = (segments > 0)[..., None, None]
    index = jnp.arange(LENGTH, dtype=jnp.int32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return jnp.where(real, blockwise_attention(q, k, v, segments, segments, index, scale=0.3, block=block), 0)

  return output_and_gradients(attention)


@functools.cache
def compiled_naive():
  return output_and_gradients(lambda q, k, v, segments: naive(q, k, v, segments, 0.3))


@st.composite
def segment_rows(draw):
  """A row of segments: some of them, then padding, or padding first, or the ids in no order at all."""
  lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
  ids = np.repeat(draw(st.permutations(range(1, len(lengths) + 1))), lengths)[:LENGTH]
  padding = np.zeros(LENGTH - ids.size, np.int64)
  return np.concatenate([padding, ids] if draw(st.booleans()) else [ids, padding])


@settings(max_examples=25, deadline=None)
@given(st.lists(segment_rows(), min_size=2, max_size=2), st.sampled_from([4, 8, 64]))
def test_blocks_equal_the_plain_formula(rows, block):
  segments = jnp.asarray(np.stack(rows), jnp.int32)
  got = compiled(block, jnp.float32)(*arrays(), segments)
  assert_close(got, compiled_naive()(*arrays(), segments))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_short_rows_in_two_blocks_equal_the_plain_formula(dtype):
  """Segments end before, at and behind the border of the blocks; one row begins with padding."""
  length = 70
  cuts = [[0, 9, 35, 60], [4, 30, 41, 70]]
  segments = np.stack([np.searchsorted(row, np.arange(length), side="right") % 4 for row in cuts]).astype(np.int32)
  assert len(query_blocks(np.arange(length))) == 2

  def attention(q, k, v):
    return packed_attention()(*(x.astype(dtype) for x in (q, k, v)), segments, 0.3)

  got = output_and_gradients(attention)(*arrays(length=length))
  expected = output_and_gradients(lambda q, k, v: naive(q, k, v, segments, 0.3))(*arrays(length=length))
  assert_close(got, expected, tolerance=2e-5 if dtype == jnp.float32 else 5e-2)


def test_bf16():
  segments = jnp.asarray([[1] * 9 + [2] * 10 + [0] * 3, [1] * LENGTH], jnp.int32)
  expected = compiled_naive()(*arrays(), segments)
  assert_close(compiled(8, jnp.bfloat16)(*arrays(), segments), expected, tolerance=5e-2)


def test_tokens_that_are_read_in_parts_of_any_order():
  """Queries of a row in any order, with the index of each: what a device of several holds."""
  q, k, v = arrays()
  segments = jnp.asarray([[1] * 9 + [2] * 10 + [0] * 3, [1] * LENGTH], jnp.int32)
  expected = naive(q, k, v, segments, 0.3)
  some = np.asarray([3, 4, 5, 20, 21, 0, 12])
  got = blockwise_attention(
    q[:, some], k, v, segments[:, some], segments, jnp.asarray(some, jnp.int32), scale=0.3, block=4
  )
  real = np.asarray(segments)[:, some] > 0
  assert_close(got[real], expected[:, some][real])


def test_no_array_has_two_long_axes():
  """Neither forward nor backward: at 4096 tokens the largest array is an input's size, as is the memory."""
  length = 4096
  q, k, v = (jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32) for _ in range(3))
  segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
  gradient = output_and_gradients(packed_attention())
  compiled = gradient.lower(q, k, v, segments).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 16 * length * 2 * 8 * 4 < length * length


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_gives_nothing_and_gets_no_gradient(poison):
  """Whatever stands there, in the gradient of the output too."""
  q, k, v = arrays()
  segments = jnp.asarray([[1] * 9 + [2] * 10 + [0] * 3, [0] * 4 + [1] * (LENGTH - 4)], jnp.int32)
  real = (segments > 0)[..., None, None]

  def run(q, k, v, of_out):
    attention = lambda q, k, v: packed_attention()(q, k, v, segments, 0.3)
    out, backward = jax.vjp(attention, q, k, v)
    return out, backward(of_out)

  of_out = jnp.cos(jnp.arange(2 * LENGTH * HEADS * VALUE_WIDTH, dtype=jnp.float32)).reshape(2, LENGTH, HEADS, -1)
  expected = jax.vjp(lambda q, k, v: naive(q, k, v, segments, 0.3), q, k, v)
  got = jax.jit(run)(*(jnp.where(real, x, poison) for x in (q, k, v, of_out)))
  assert_close(got, (expected[0], expected[1](of_out)))


MESHES = {
  "rows and context": (MeshConfig(fsdp=2, context=4), AxisRules()),
  "tensor and context": (MeshConfig(tensor=2, context=2, fsdp=2), AxisRules()),
  "every device has all kv heads": (MeshConfig(tensor=4, context=2, fsdp=1), AxisRules(kv_heads=None)),
  "three heads of a group and one of another": (MeshConfig(tensor=2, fsdp=4), AxisRules(kv_heads=None)),
}


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_equal_one(name):
  mesh, rules = MESHES[name]
  heads, kv_heads = (12, 4) if name.startswith("three") else (8, 2)
  inputs = arrays(rows=4, length=24, heads=heads, kv_heads=kv_heads)
  segments = jnp.asarray([[1] * 24, [1] * 5 + [2] * 17 + [0] * 2, [3] * 20 + [0] * 4, [0] * 24], jnp.int32)
  expected = output_and_gradients(packed_attention())(*inputs, segments)
  assert_close(expected, output_and_gradients(lambda q, k, v, s: naive(q, k, v, s, WIDTH**-0.5))(*inputs, segments))

  layout = Layout(make_mesh(mesh), rules)
  place = lambda x, heads: jax.device_put(x, layout.sharding("batch", "sequence", heads, None))
  placed = [place(x, axis) for x, axis in zip(inputs, ("heads", "kv_heads", "kv_heads"), strict=True)]
  placed.append(jax.device_put(segments, layout.sharding("batch", "sequence")))
  assert_close(output_and_gradients(packed_attention(layout))(*placed), expected)


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_shards_do_equal_work(shards):
  """Every query once, and of the pairs below the diagonal as many on every shard, up to the chunks' own triangles."""
  length = 16 * shards
  order = query_order(length, shards)
  assert sorted(order.reshape(-1)) == list(range(length))
  work = (order + 1).sum(axis=1)
  assert work.max() == work.min()
  assert len({tuple(sorted(row)) for row in query_order(length + shards, shards).tolist()}) == shards  # not divisible
