"""Attention over chosen positions of packed rows: equal to masked attention, on one device and on every mesh axis."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import latent_toy as toy
from toys.masked_attention import grouped_attention, packed_causal_mask

from sao_jax.config import MeshConfig
from sao_jax.models.attention import packed_latent, selected, sparse
from sao_jax.models.attention.latent import latent_layer, packed_latent_attend
from sao_jax.models.attention.packed_latent import packed_choice
from sao_jax.models.attention.selected import read_selected, selected_attention
from sao_jax.models.attention.sparse import Index, index_scores
from sao_jax.models.rope import rope_table
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.mesh import make_mesh

HEADS, RANK, WIDTH, TOPK, SCALE = 4, 6, 9, 5, 0.4
RNG = np.random.default_rng(0)


def random(*shape, scale=1.0):
  return jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)


def random_index(rows, length):
  """An indexer of 2 heads, with many scores that are 0."""
  return Index(random(rows, length, 2, 3), random(rows, length, 2), random(rows, length, 3))


def masked_choice(index, segments, k):
  """The same choice as a mask [B, T, T], by sorting each row of all scores."""
  scores = np.asarray(index_scores(*index))
  mask = np.array(packed_causal_mask(segments))
  for b, t in np.ndindex(mask.shape[:2]):
    best = sorted(np.flatnonzero(mask[b, t]), key=lambda s: (-scores[b, t, s], s))[:k]
    mask[b, t] = np.isin(np.arange(mask.shape[2]), best)
  return mask


def masked_attention(queries, latents, mask):
  """Every position is multiplied, what is not selected is masked."""
  return grouped_attention(queries, latents[:, :, None], latents[:, :, None, :RANK], mask, SCALE)


def loss(attention, queries, latents, *rest):
  return jnp.sum(jnp.sin(attention(queries, latents, *rest)))


selected_loss = functools.partial(loss, lambda *args: selected_attention(*args, RANK, SCALE))
of_selected = jax.jit(jax.value_and_grad(selected_loss, argnums=(0, 1)))
of_masked = jax.jit(jax.value_and_grad(functools.partial(loss, masked_attention), argnums=(0, 1)))
choose = jax.jit(packed_choice, static_argnums=(2, 3))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2 * 24, max_size=2 * 24), st.integers(0, 2**31))
def test_choice_outputs_and_gradients_equal_those_of_masked_attention(jumps, seed):
  """Any segments, among them padding and segments of fewer than k tokens."""
  segments = jnp.asarray(np.cumsum(np.asarray(jumps).reshape(2, 24) == 2, axis=1), jnp.int32)
  rng = np.random.default_rng(seed)
  index = Index(*(jnp.asarray(rng.integers(-2, 3, size=x.shape), jnp.float32) for x in random_index(2, 24)))  # ties
  queries, latents = random(2, 24, HEADS, WIDTH), random(2, 24, WIDTH)

  selection, mask = choose(index, segments, TOPK, ONE_DEVICE), masked_choice(index, segments, TOPK)
  np.testing.assert_array_equal(toy.as_mask(selection, segments), mask)
  got, expected = of_selected(queries, latents, selection), of_masked(queries, latents, mask)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def test_blocks_of_queries_and_stairs_change_nothing(monkeypatch):
  """Rows of 20 in stairs of 10, each in blocks of 8, the last of which is filled up."""
  index, segments = random_index(2, 20), jnp.asarray([[1] * 7 + [2] * 13, [1] * 18 + [0] * 2], jnp.int32)
  queries, latents = random(2, 20, HEADS, WIDTH), random(2, 20, WIDTH)
  selection = choose(index, segments, TOPK, ONE_DEVICE)
  expected = of_selected(queries, latents, selection)

  for room in (selected, sparse):
    monkeypatch.setattr(room, "BLOCK_BYTES", 1)
  monkeypatch.setattr(packed_latent, "STAIR_QUERIES", 10)
  traced = jax.jit(lambda *x: packed_choice(*x, TOPK, ONE_DEVICE)).trace(index, segments)
  assert "f32[6,8,10]" in str(traced.jaxpr)  # scores of both stairs, against 3 stretches of 10 keys in place of 4
  again = jax.jit(jax.value_and_grad(lambda *x: selected_loss(*x), argnums=(0, 1)))(queries, latents, selection)
  np.testing.assert_array_equal(traced.lower().compile()(index, segments), selection)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), again, expected)


MESHES = {
  "context": ({"context": 4, "data": 2}, toy.CONFIG),
  "context and tensor": ({"context": 2, "tensor": 2, "fsdp": 2}, dataclasses.replace(toy.CONFIG, yarn=toy.YARN)),
  "all positions": ({"context": 2, "tensor": 2, "fsdp": 2}, dataclasses.replace(toy.DENSE, yarn=toy.YARN)),
}


@pytest.mark.parametrize("name", MESHES)
def test_rows_over_several_devices_equal_one_device(name, monkeypatch):
  """Latents are gathered over context, and nothing per head; stairs are shared out: 32 tokens in stairs of 8, or 4."""
  monkeypatch.setattr(packed_latent, "STAIR_QUERIES", 4)
  sizes, config = MESHES[name]
  layout = Layout(make_mesh(MeshConfig(**{"fsdp": 1, **sizes})))
  params, _ = toy.layer_params()
  rank, plain, rotary = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
  segments = jnp.asarray([[1] * 20 + [2] * 12, [1] * 5 + [2] * 24 + [0] * 3], jnp.int32)
  index, latent, q = random_index(2, 32), random(2, 32, rank + rotary), random(2, 32, HEADS, plain + rotary)

  def run(layout, index, q, latent, kv_b):
    attend = packed_latent_attend(config, segments, layout)
    selection = attend.select(index, jnp.int32(0), None)[0] if config.index_topk else None
    out, _ = attend.attend(q, latent, kv_b, selection, jnp.int32(0), None)
    return jnp.sum(jnp.sin(out)), (selection, out)

  grad = lambda layout: jax.jit(jax.value_and_grad(functools.partial(run, layout), argnums=(1, 2, 3), has_aux=True))
  expected = grad(ONE_DEVICE)(index, q, latent, params["kv_b"])
  placed = jax.device_put((index, q, latent), layout.sharding("batch", "sequence"))
  traced = grad(layout).trace(*placed, params["kv_b"])
  got = traced.lower().compile()(*placed, params["kv_b"])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)
  moved = re.findall(r"\w+\[([\d,]+)\] = (all_gather|reduce_scatter)", str(traced.jaxpr))
  assert {kind for _, kind in moved} == {"all_gather", "reduce_scatter"}
  assert all(shape.count(",") <= 2 for shape, _ in moved)  # [B, T, m], never [B, T, H, h]


def test_a_row_that_cannot_be_shared_out_is_scored_whole():
  layout = Layout(make_mesh(MeshConfig(fsdp=1, context=8)))
  index, segments = random_index(1, 40), jnp.asarray([[1] * 28 + [2] * 12], jnp.int32)  # 5 tokens for each of 8
  expected = packed_choice(index, segments, TOPK, ONE_DEVICE)
  np.testing.assert_array_equal(choose(index, segments, TOPK, layout), expected)


def test_tokens_that_are_not_finite_harm_their_own_segment_only():
  """Padding and foreign tokens of NaN: not read with weight 0 either."""
  segments = jnp.asarray([[1] * 3 + [2] * 9 + [0] * 4], jnp.int32)
  config, (params, indexers) = dataclasses.replace(toy.CONFIG, index_topk=4), toy.layer_params()
  x = toy.hidden_states(length=16)
  positions = jnp.arange(16, dtype=jnp.int32)[None]
  run = jax.jit(toy.run_layer, static_argnames="config")
  clean, _ = run(params, indexers, x, positions, segments, config=config)
  spoilt, _ = run(
    params, indexers, x.at[:, :3].set(jnp.nan).at[:, 12:].set(jnp.nan), positions, segments, config=config
  )
  np.testing.assert_array_equal(spoilt[:, 3:12], clean[:, 3:12])


def test_only_selected_latents_are_asked_for():
  """The sampler's side: a query with fewer than k positions asks for its own ones only."""
  queries, latents = random(1, 2, HEADS, WIDTH), random(1, 8, WIDTH)
  selection = jnp.asarray([[[2, 5, -1], [0, 1, 7]]], jnp.int32)
  asked = []

  def gather(positions):
    asked.append(positions)
    return latents[0][positions]

  out = read_selected(queries, gather, selection, RANK, SCALE)
  assert asked[0].tolist() == [[[2, 5, 2], [0, 1, 7]]]
  expected = masked_attention(queries, latents, toy.as_mask(selection, latents[..., 0]))
  np.testing.assert_allclose(out, expected, atol=1e-5)


def test_no_array_has_two_axes_of_the_length_of_a_row():
  """The gradient of a layer over 1024 tokens, of which 8 are read: neither as it is traced, nor compiled."""
  length, config = 1024, dataclasses.replace(toy.CONFIG, index_topk=8, index_num_heads=3)
  params, indexers = toy.layer_params(config)
  segments, positions = jnp.ones((1, length), jnp.int32), jnp.arange(length, dtype=jnp.int32)[None]
  attend = packed_latent_attend(config, segments)
  table = rope_table(positions, config.qk_rope_head_dim, config.rope_theta)

  def run(params, x):
    stack = {"indexer_layers": indexers}
    return jnp.sum(latent_layer(params, x, table, config, attend, jnp.int32(0), None, common=stack, passed=None)[0])

  traced = jax.jit(jax.grad(run, argnums=(0, 1))).trace(params, toy.hidden_states(length=length))
  for text in (str(traced.jaxpr), traced.lower().compile().as_text()):
    shapes = [[int(size) for size in found.split(",")] for found in re.findall(r"\[([\d,]+)\]", text)]
    assert max(max(shape) for shape in shapes) >= length
    assert all(sum(size >= length for size in shape) < 2 for shape in shapes)
