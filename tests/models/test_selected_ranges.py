"""Kernels of attention over selected latents, in Pallas' interpreter, equal their reference in plain jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models.attention import latent_words, selected_kernels, selected_ranges
from sao_jax.models.attention.selected import selected_attention
from sao_jax.models.attention.selected_ranges import ranged_attention

ROWS, QUERIES, POSITIONS, HEADS, RANK, WIDTH, SCALE = 2, 20, 44, 3, 6, 9, 0.4


@pytest.fixture
def small_parts(monkeypatch):
  """Two ranges of 32 positions, the last one filled up; 8 queries at a time; chunks of 16 rows and of 8."""
  monkeypatch.setattr(selected_ranges, "split_positions", lambda *_: latent_words.Ranges(2, 32))
  monkeypatch.setattr(selected_kernels, "CHUNK", 16)
  monkeypatch.setattr(selected_ranges, "PIECE_BYTES", 1)


def random_selection(most, seed=0):
  """Ascending positions of every query, one to `most` of them, then -1; the first ones stand side by side."""
  rng, selection = np.random.default_rng(seed), np.full((ROWS, QUERIES, most), -1, np.int32)
  for row, query in np.ndindex(ROWS, QUERIES):
    first, count = rng.integers(0, POSITIONS - 12), rng.integers(1, most + 1)
    near = np.arange(first, first + 12)
    others = rng.choice(np.setdiff1d(np.arange(POSITIONS), near), max(count - 12, 0), replace=False)
    selection[row, query, :count] = np.sort(np.concatenate([near[:count], others]))
  return jnp.asarray(selection)


def random_inputs(dtype, seed=1):
  rng = np.random.default_rng(seed)
  random = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  return (random(ROWS, QUERIES, HEADS, WIDTH), random(ROWS, POSITIONS, WIDTH)), random(ROWS, QUERIES, HEADS, RANK)


def run(attention, inputs, selection, of_out, *options):
  """The output and the gradients of queries and latents."""

  def both(queries, latents, selection, of_out):
    out, backward = jax.vjp(lambda *x: attention(*x, selection, RANK, SCALE, *options), queries, latents)
    return out, *backward(of_out)

  return jax.jit(both)(*inputs, selection, of_out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_and_gradients_are_those_of_the_reference(dtype, small_parts):
  """Ranges that a query reads nothing of, half a chunk, a whole one, and both; entries of -1."""
  inputs, of_out = random_inputs(dtype)
  selection = random_selection(most=30)
  stretches = [np.sum(np.asarray(selection) // 32 == number, axis=-1) for number in (0, 1)]
  assert {-(-int(size) // 8) for size in np.ravel(stretches)} >= {0, 1, 2, 3}
  got = run(ranged_attention, inputs, selection, of_out, True)
  expected = run(selected_attention, inputs, selection, of_out)

  # Sums of bf16 numbers are in fp32, but weights are rounded before they are normalised.
  tolerance = 2e-6 if dtype == "float32" else 2e-2
  for a, b in zip(got, expected, strict=True):
    assert a.dtype == b.dtype == dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=tolerance, atol=tolerance)


def test_nothing_is_read_of_a_latent_that_is_not_selected(small_parts):
  """Those of another segment may not be finite: neither the output nor a gradient sees them."""
  (queries, latents), of_out = random_inputs("float32")
  chosen = random_selection(most=5).at[..., 0].set(0)
  others = jnp.where((chosen < 0) | (chosen % 16 == 3), POSITIONS, chosen)
  selection = jnp.where(jnp.sort(others) < POSITIONS, jnp.sort(others), -1)
  spoilt = latents.at[:, 3::16].set(jnp.nan)
  clean = run(ranged_attention, (queries, latents), selection, of_out, True)
  for a, b in zip(run(ranged_attention, (queries, spoilt), selection, of_out, True), clean, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("dtype", "shapes"), [("float32", (512, 4)), ("bfloat16", (256, 4))])
def test_latents_are_unpacked_as_they_were(dtype, shapes):
  """Of the published widths: the rotary numbers of two latents share a row of lanes."""
  latents = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 576)), dtype)
  form = latent_words.Form(512, 576, dtype)
  compressed, rotary = latent_words.pack(latents, form, 8)
  assert (compressed.shape, rotary.shape) == ((1, 8, shapes[0]), (1, shapes[1], 128))
  unpacked = latent_words.unpack(compressed[0], rotary.reshape(8, 64), form)
  np.testing.assert_array_equal(unpacked[:5], latents[0])


@pytest.mark.parametrize(("heads", "dtype", "count"), [(8, "bfloat16", 8), (64, "bfloat16", 8), (128, "bfloat16", 9)])
def test_more_heads_leave_ranges_less_room(heads, dtype, count):
  """Of the published widths and 131,072 positions, in the backward pass: all fits into VMEM."""
  form = latent_words.Form(512, 576, dtype)
  beside = selected_kernels.block_bytes(jnp.zeros((1, 1, heads, 576), dtype), form)
  assert beside > 2 * selected_kernels.QUERIES * heads * (2 * 576 + 512) * 2
  bytes_per_key = form.word_bytes + form.gradient_bytes
  ranges = latent_words.split_positions(131072, bytes_per_key, beside)
  assert ranges.count == count
  assert ranges.keys * bytes_per_key + beside <= selected_kernels.VMEM_BYTES - 2 * 2**20
