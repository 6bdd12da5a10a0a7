"""Latent and sparse attention: the two forms agree, packing and padding change nothing, the choice is deterministic."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import latent_toy as toy
from toys.masked_attention import grouped_attention, packed_causal_mask

from sao_jax.config import YarnConfig
from sao_jax.models.attention.latent import absorb, absorbed_values, expand, latent_keys, latent_queries
from sao_jax.models.attention.sparse import index_scores, is_full
from sao_jax.models.rope import rope_table

run = jax.jit(toy.run_layer, static_argnames="config")


def alone(length=toy.LENGTH):
  """Positions and segments of a row with one sequence."""
  return jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32)


def test_absorbed_attention_equals_expanded_attention():
  config, rng = toy.CONFIG, np.random.default_rng(1)
  params, _ = toy.layer_params()
  random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  heads, rank, plain = config.num_heads, config.kv_lora_rank, config.qk_nope_head_dim
  q = random(2, 7, heads, plain + config.qk_rope_head_dim)
  latent = random(2, 7, rank + config.qk_rope_head_dim)
  mask = packed_causal_mask(jnp.asarray([[1] * 7, [1, 1, 1, 2, 2, 2, 2]], jnp.int32))
  k, v = expand(latent, params["kv_b"], plain)
  assert k.shape == (2, 7, heads, 14) and v.shape == (2, 7, heads, config.v_head_dim)
  expanded = grouped_attention(q, k, v, mask)

  one_head = latent[:, :, None]
  queries = absorb(q, params["kv_b"], plain)
  weighted = grouped_attention(queries, one_head, one_head[..., :rank], mask, scale=q.shape[-1] ** -0.5)
  np.testing.assert_allclose(absorbed_values(weighted, params["kv_b"], plain), expanded, atol=1e-5)


@pytest.mark.parametrize("config", [toy.CONFIG, toy.DENSE], ids=["sparse", "all positions"])
def test_packed_and_padded_rows_equal_each_sequence_alone(config):
  params, indexers = toy.layer_params()
  x = toy.hidden_states()
  expected, chosen = run(params, indexers, x, *alone(), config=config)
  assert float(jnp.std(expected)) > 0.1

  def placed(before, after):  # the sequence between `before` and `after` tokens of others
    others = toy.hidden_states(length=before + after, seed=9)
    row = jnp.concatenate([others[:, :before], x, others[:, before:]], axis=1)
    positions = np.concatenate([np.arange(before), np.arange(toy.LENGTH), np.arange(after)])
    return row, jnp.asarray(positions, jnp.int32)[None]

  for before, after, left, right in ((7, 8, 1, 3), (6, 0, 0, 0), (0, 6, 0, 0)):  # packed, left and right padding
    row, positions = placed(before, after)
    segments = jnp.asarray([left] * before + [2] * toy.LENGTH + [right] * after, jnp.int32)[None]
    out, selection = run(params, indexers, row, positions, segments, config=config)
    inside = slice(before, before + toy.LENGTH)
    np.testing.assert_allclose(out[:, inside], expected, atol=1e-5)
    if config.index_topk:
      np.testing.assert_array_equal(selection[:, inside, inside], chosen)
      assert np.asarray(selection[:, inside]).sum() == np.asarray(chosen).sum()  # nothing of the others


def test_queries_read_all_positions_until_there_are_more_than_k():
  params, indexers = toy.layer_params()
  _, selection = run(params, indexers, toy.hidden_states(), *alone())
  selection = np.asarray(selection[0])
  assert not np.triu(selection, 1).any()
  np.testing.assert_array_equal(selection.sum(axis=1), np.minimum(np.arange(toy.LENGTH) + 1, 5))
  assert not selection[:, :8][12].all() and not selection[12, -5:].all()  # a choice, not a window


def test_with_k_at_least_the_length_sparse_attention_is_full_attention():
  params, indexers = toy.layer_params()
  x = toy.hidden_states()
  full, _ = run(params, indexers, x, *alone(), config=toy.DENSE)
  wide, _ = run(params, indexers, x, *alone(), config=dataclasses.replace(toy.CONFIG, index_topk=toy.LENGTH))
  sparse, _ = run(params, indexers, x, *alone())
  np.testing.assert_allclose(wide, full, rtol=1e-4, atol=1e-5)
  assert float(jnp.max(jnp.abs(sparse - full))) > 1e-3


def test_no_gradient_reaches_the_indexer_and_none_comes_through_it():
  params, indexers = toy.layer_params()
  x, (positions, segments) = toy.hidden_states(), alone()
  loss = lambda params, indexers, x: jnp.sum(toy.run_layer(params, indexers, x, positions, segments)[0] ** 2)
  of_params, of_indexers, of_x = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(params, indexers, x)
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(of_indexers))
  assert all(np.any(leaf) for leaf in jax.tree.leaves(of_params))

  _, selection = toy.run_layer(params, indexers, x, positions, segments)

  def chosen_loss(params, x):  # attention over a given selection: what the gradient should be
    q, k, v = expanded(params, x, positions)
    return jnp.sum(jnp.einsum("bthv,hvd->btd", grouped_attention(q, k, v, selection), params["o"]) ** 2)

  expected_params, expected_x = jax.jit(jax.grad(chosen_loss, argnums=(0, 1)))(params, x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), of_params, expected_params)
  np.testing.assert_allclose(of_x, expected_x, rtol=1e-4, atol=1e-3)


def expanded(params, x, positions):
  """Queries, keys and values of a layer."""
  table = rope_table(positions, toy.CONFIG.qk_rope_head_dim, toy.CONFIG.rope_theta)
  q, _ = latent_queries(params, x, table, toy.CONFIG)
  return q, *expand(latent_keys(params, x, table, toy.CONFIG), params["kv_b"], toy.CONFIG.qk_nope_head_dim)


def test_index_scores_are_the_weighted_sum_of_rectified_products():
  rng = np.random.default_rng(4)
  queries, weights, keys = rng.normal(size=(2, 5, 3, 4)), rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 7, 4))
  expected = np.einsum("bti,btis->bts", weights, np.maximum(np.einsum("btih,bsh->btis", queries, keys), 0))
  arrays = [jnp.asarray(x, jnp.float32) for x in (queries, weights, keys)]
  np.testing.assert_allclose(index_scores(*arrays), expected, atol=1e-5)


def test_layers_have_indexers_of_their_own_unless_marked_shared():
  assert is_full(toy.CONFIG) == (True, True)
  assert is_full(dataclasses.replace(toy.CONFIG, indexer_types=("full", "shared"))) == (True, False)


def test_a_stretched_context_sharpens_the_scores():
  """By the square of 0.1 m ln(factor) + 1, in attention that reads all positions and in attention that chooses."""
  params, indexers = toy.layer_params()
  x, (positions, segments) = toy.hidden_states(), alone()
  sharper = (0.1 * 0.7 * np.log(40.0) + 1) ** 2
  yarn = YarnConfig(factor=40.0, original_positions=10**9, attention_factor=1.0, mscale_all_dim=0.7)
  for plain in (toy.CONFIG, toy.DENSE):
    config = dataclasses.replace(plain, yarn=yarn)  # within so many positions every frequency turns often: none changes
    out, selection = run(params, indexers, x, positions, segments, config=config)
    q, k, v = expanded(params, x, positions)
    read = grouped_attention(q, k, v, selection, scale=sharper * q.shape[-1] ** -0.5)
    np.testing.assert_allclose(out, jnp.einsum("bthv,hvd->btd", read, params["o"]), atol=1e-5)
    assert float(jnp.max(jnp.abs(out - run(params, indexers, x, positions, segments, config=plain)[0]))) > 1e-2
