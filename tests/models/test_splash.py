"""Splash attention, in Pallas' interpreter, equals attention in blocks; its tables equal those of jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models.attention import splash
from sao_jax.models.attention.blockwise import blockwise_shard
from sao_jax.models.attention.shards import query_order


@pytest.mark.parametrize(("length", "shards"), [(200, 1), (512, 2)], ids=["filled up", "two chunks of a row"])
def test_it_equals_attention_in_blocks(length, shards):
  """Output and gradients, of grouped heads whose keys and values differ in width, as the last of `shards` devices."""
  rng, shard = np.random.default_rng(0), shards - 1
  random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  order = query_order(length, shards)
  own = order[shard]
  segments = jnp.asarray([[1] * (length // 3) + [2] * (length - length // 3)], jnp.int32)
  inputs = random(1, own.size, 2, 16), random(1, length, 1, 16), random(1, length, 1, 8)
  of_out = random(1, own.size, 2, 8)

  def run(attention, **options):
    shape = (segments[:, own], segments, order, shard, 0.3)
    out, backward = jax.vjp(lambda q, k, v: attention(q, k, v, *shape, **options), *inputs)
    return out, backward(of_out)

  got = jax.jit(lambda: run(splash.splash_shard, interpret=True))()
  expected = jax.jit(lambda: run(blockwise_shard))()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


@pytest.mark.parametrize("length", [384, 2048])
def test_tables_made_of_corners_are_those_of_the_whole_mask(length):
  kernels = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
  masks = pytest.importorskip("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")
  own = splash._kernel(splash._Order(query_order(length, 1)), length, 256, False)
  whole = kernels.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask((length, length))]),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=own.kwargs["block_sizes"],
  )
  for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
    got, expected = jax.tree.map(lambda x: x[0], getattr(own, name)), getattr(whole, name)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_every_shard_visits_as_many_blocks():
  """And a row of 131,072 tokens takes no minutes: its tables are made from 4 numbers of each of 16,384 blocks."""
  kernel = splash._kernel(splash._Order(query_order(131_072, 4)), 131_072, 128, False)
  visited = np.count_nonzero(kernel.fwd_mask_info.block_mask, axis=(1, 2, 3))
  assert visited.tolist() == [128 * 129 // 2 // 4] * 4
