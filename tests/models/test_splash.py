"""Splash attention, in Pallas' interpreter, equals attention in blocks; its tables equal those of jax."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models.attention import splash, splash_gradient
from sao_jax.models.attention.blockwise import blockwise_shard
from sao_jax.models.attention.shards import query_order

ROWS = {
  "filled up": (200, 1, 16, 1),
  "two chunks of a row": (512, 2, 16, 3),
  "the first device, which sees no key of the last chunks": (387, 3, 16, 1),
  "wide heads": (256, 1, 160, 1),
}


@pytest.mark.parametrize(("length", "shards", "width", "blocks"), ROWS.values(), ids=ROWS)
def test_it_equals_attention_in_blocks(length, shards, width, blocks, monkeypatch):
  """Output and gradients, of grouped heads whose keys and values differ in width, as one of `shards` devices.

  Segments end inside of chunks of keys, which are as many blocks as the bytes of partial gradients allow.
  """
  rng, shard = np.random.default_rng(0), shards - 1 if shards < 3 else 0
  random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  order = query_order(length, shards)
  own = order[shard]
  segments = jnp.asarray([[1] * end + [2] * (length - end) for end in (length // 3, length // 2)], jnp.int32)
  inputs = random(2, own.size, 2, width), random(2, length, 1, width), random(2, length, 1, 8)
  of_out = random(2, own.size, 2, 8)

  # Blocks of 128 keys; the gradient of all queries, filled up, that each of them makes.
  small = splash_gradient.GradientBlocks(128, 128, 128)
  monkeypatch.setattr(splash, "NARROW_HEADS" if width <= 128 else "WIDE_HEADS", small)
  partial = 2 * 2 * math.ceil(own.size / 128) * math.ceil(width / 128) * 128 * 128 * 4
  monkeypatch.setattr(splash_gradient, "PARTIAL_BYTES", blocks * partial)
  splash._tables.cache_clear()

  def run(attention, **options):
    shape = (segments[:, own], segments, order, shard, 0.3)
    out, backward = jax.vjp(lambda q, k, v: attention(q, k, v, *shape, **options), *inputs)
    return out, backward(of_out)

  got = jax.jit(lambda: run(splash.splash_shard, interpret=True))()
  expected = jax.jit(lambda: run(blockwise_shard))()
  splash._tables.cache_clear()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


@pytest.mark.parametrize("length", [384, 2048])
def test_tables_made_of_corners_are_those_of_the_whole_mask(length):
  kernels = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
  masks = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")
  own = splash._tables(splash._Order(query_order(length, 1)), length, 256)
  whole = kernels.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((length, length))]), head_shards=1, q_seq_shards=1, block_sizes=own.blocks
  )
  for got, expected in zip(own.tables, (whole.fwd_mask_info, whole.dkv_mask_info), strict=True):
    got = jax.tree.map(lambda x: x[0], got)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_every_shard_visits_as_many_blocks():
  """And a row of 131,072 tokens takes no minutes: its tables are made from 4 numbers of each of 16,384 blocks."""
  tables = splash._tables(splash._Order(query_order(131_072, 4)), 131_072, 128).tables
  visited = lambda table: np.count_nonzero(table.block_mask, axis=(1, 2, 3)).tolist()
  assert visited(tables.forward) == [128 * 129 // 2 // 4] * 4
  # Of gradients, with 2048 keys at a time: 1.6 % more than half of all.
  assert visited(tables.backward) == [2 * 64 * 65 // 2 // 4] * 4


def test_partial_gradients_of_queries_are_bounded():
  """32 heads of 32,768 queries: four blocks of keys at a time, of 256 MiB each."""
  assert splash_gradient.blocks_of_chunk(64, 32 * 32_768 * 128 * 2) == 4
  assert splash_gradient.blocks_of_chunk(6, 2**28) == 3  # chunks are of equal size
  assert splash_gradient.blocks_of_chunk(6, 2**31) == 1
