"""Writing the cache: only what is asked, never clamped over older entries (L10), cast to its dtype (L11)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys.latent_toy import CONFIG as LATENT

from sao_jax.config import ModelConfig
from sao_jax.models.attention import KINDS
from sao_jax.sampler.cache import clear_rows, read_window, write_rows
from sao_jax.sampler.caches import CACHES, empty_cache
from sao_jax.sampler.kv_cache import KVCache

MODEL = ModelConfig(num_layers=2, num_kv_heads=2, head_dim=4)
SLOTS, LENGTH, ROWS, WIDTH = 3, 7, 2, 4
write = jax.jit(write_rows)


def numbered(rows, length, first):
  """A cache in which every number is different; k and v hold the same ones."""
  k = first + np.arange(rows * 2 * 2 * 4 * length, dtype=np.float32).reshape(rows, 2, 2, 4, length)
  return KVCache(k=jnp.asarray(k), v=jnp.asarray(np.swapaxes(k, 3, 4)))


@given(st.permutations(range(SLOTS)), st.data())
def test_write_changes_exactly_the_positions_asked(slots, data):
  counts = [data.draw(st.integers(0, WIDTH)) for _ in range(ROWS)]
  starts = [data.draw(st.integers(0, LENGTH - count)) for count in counts]
  slots = [slot if count else data.draw(st.sampled_from([slot, SLOTS])) for slot, count in zip(slots, counts)]
  old, new = numbered(SLOTS, LENGTH, 0.0), numbered(ROWS, WIDTH, 1e4)
  array = lambda x: jnp.asarray(x, jnp.int32)
  result = write(old, new, array(slots), array(starts), array(counts))
  expected = np.array(old.k)
  for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
    if count:
      expected[slot, ..., start : start + count] = np.asarray(new.k)[row, ..., :count]
  np.testing.assert_array_equal(result.k, expected)
  np.testing.assert_array_equal(result.v, np.swapaxes(expected, 3, 4))


def test_new_block_wider_than_the_cache():
  old, new = numbered(1, 3, 0.0), numbered(1, 5, 1e4)
  one = lambda x: jnp.asarray([x], jnp.int32)
  result = write_rows(old, new, one(0), one(1), one(2))
  np.testing.assert_array_equal(result.k[..., 0], old.k[..., 0])
  np.testing.assert_array_equal(result.k[..., 1:], new.k[..., :2])


def test_every_kind_of_attention_has_a_cache():
  assert set(CACHES) == set(KINDS)
  for model in (MODEL, LATENT):
    cache = empty_cache(model, SLOTS, LENGTH, "float32")
    assert (cache.num_slots, cache.num_positions, cache.dtype) == (SLOTS, LENGTH, jnp.float32)
    axes = jax.tree.map(lambda values, axis: values.shape[axis], cache, cache.position_axes)
    assert set(jax.tree.leaves(axes)) == {LENGTH}


def test_clearing_reaches_what_weights_multiply_and_nothing_else():
  old = numbered(SLOTS, LENGTH, 1.0)
  cleared = clear_rows(old, jnp.asarray([1, SLOTS, -1], jnp.int32))
  np.testing.assert_array_equal(cleared.k, old.k)
  np.testing.assert_array_equal(cleared.v, np.asarray(old.v) * np.asarray([1, 0, 1])[:, None, None, None, None])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cast_on_write(dtype):  # L11
  cache = empty_cache(MODEL, SLOTS, LENGTH, dtype)
  new = numbered(ROWS, WIDTH, 0.123)
  array = lambda *x: jnp.asarray(x, jnp.int32)
  result = write(cache, new, array(1, 2), array(0, 3), array(4, 4))
  assert result.k.dtype == result.v.dtype == jnp.dtype(dtype)
  np.testing.assert_array_equal(result.k[1, ..., :4], new.k[0].astype(dtype))


def test_window():
  cache = numbered(SLOTS, LENGTH, 0.0)
  everything = read_window(cache, None, 5)
  np.testing.assert_array_equal(everything.k, cache.k[..., :5])
  some = read_window(cache, jnp.asarray([2, 0, SLOTS], jnp.int32), 5)
  np.testing.assert_array_equal(some.v[:2], cache.v[jnp.asarray([2, 0]), :, :, :5])
  assert read_window(cache, None, 0).k.shape == (SLOTS, 2, 2, 4, 0)
