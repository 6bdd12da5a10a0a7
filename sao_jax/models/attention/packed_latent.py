"""Latent attention over packed rows: which latents a query reads, one device or many.

Queries stay where their tokens are. What they read is small, one latent and one indexer's key per token for all heads:
over the mesh axes of the sequence those are gathered, and the gradients of latents scattered back as sums.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from sao_jax.models.attention.selected import selected_attention
from sao_jax.models.attention.shards import gather_sequence
from sao_jax.models.attention.sparse import Index, choose_in_pair, choose_positions
from sao_jax.parallel.layout import Layout

STAIRS = 8  # parts of a row that are scored against the keys before their end: 9/16 of all products in place of 1/2
STAIR_QUERIES = 64  # shorter ones are not worth a round of their own


def packed_choice(
  index: Index, segment_ids: Int[Array, "B T"], num_selected: int, layout: Layout
) -> Int[Array, "B T k"]:
  """The positions in its row that each token reads: `num_selected`, causal within segments, ascending, then -1."""
  local = functools.partial(_choose, num_selected=num_selected, layout=layout)
  if not layout.is_sharded:
    return local(*index, segment_ids)
  tokens = lambda *rest: layout.spec("batch", "sequence", *rest)
  specs = (tokens(None, None), tokens(None), tokens(None), tokens())
  choose = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=tokens(None), check_vma=False)
  return choose(*index, segment_ids)


def _choose(
  queries: Float[Array, "B t I i"],
  weights: Float[Array, "B t I"],
  keys: Float[Array, "B t i"],
  segments: Int[Array, "B t"],
  *,
  num_selected: int,
  layout: Layout,
) -> Int[Array, "B t k"]:
  """`packed_choice` as one device computes it, for the t tokens of its rows."""
  axes, shards, length = layout.rules.mesh_axes("sequence"), layout.shards("sequence"), segments.shape[1]
  first = jax.lax.axis_index(axes) * length if shards > 1 else 0
  rows = jnp.broadcast_to(first + jnp.arange(length, dtype=jnp.int32), segments.shape)
  all_keys, all_segments = gather_sequence(keys, layout), gather_sequence(segments, layout)
  all_rows = jnp.broadcast_to(jnp.arange(all_keys.shape[1], dtype=jnp.int32), all_segments.shape)

  # Where stairs cannot be shared out, all queries are scored against the whole row.
  stairs = _stairs(length, shards)
  if not stairs:
    readable = functools.partial(_causal, all_segments, all_rows)
    return choose_positions(queries, weights, [all_keys], readable, num_selected, segments, rows)

  # The row in stairs: each device has the same share of every stair, since late queries have more to read than early
  # ones. A stair is scored against the keys before its end only, the first with the last, and so on.
  shares = [_in_pairs(_share_out(x, stairs, axes, shards)) for x in (queries, weights, segments, rows)]

  def choose(_: None, pair: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
    low, queries, weights, *of_queries = pair
    of_keys, number = (all_segments, all_rows), stairs * shards
    return None, choose_in_pair(
      queries, weights, all_keys, _causal, num_selected, number, low, of_keys=of_keys, of_queries=of_queries
    )

  _, chosen = jax.lax.scan(choose, None, (jnp.arange(stairs * shards // 2, dtype=jnp.int32), *shares))
  return _take_back(_out_of_pairs(chosen), stairs, axes, shards)


def _stairs(length: int, shards: int) -> int:
  """The number of stairs that the tokens of one device make up; 0 where no even number can be shared out evenly."""
  most = max(min(STAIRS // shards, length // STAIR_QUERIES), 1)
  can_be = lambda count: length % (count * shards) == 0 and count * shards % 2 == 0
  return next(filter(can_be, range(most, 0, -1)), 0)


def _share_out(
  x: Shaped[Array, "B t ..."], stairs: int, axes: tuple[str, ...], shards: int
) -> Shaped[Array, "B n s ..."]:
  """This device's part of every stair of the row, in the order of the row."""
  x = x.reshape(x.shape[0], stairs, shards, -1, *x.shape[2:])
  x = jax.lax.all_to_all(x, axes, 2, 1) if shards > 1 else x.swapaxes(1, 2)
  return x.reshape(x.shape[0], shards * stairs, *x.shape[3:])


def _take_back(
  x: Shaped[Array, "B n s ..."], stairs: int, axes: tuple[str, ...], shards: int
) -> Shaped[Array, "B t ..."]:
  """The results for the tokens of this device, from those for its part of every stair."""
  x = x.reshape(x.shape[0], shards, stairs, *x.shape[2:])
  x = jax.lax.all_to_all(x, axes, 1, 2) if shards > 1 else x.swapaxes(1, 2)
  return x.reshape(x.shape[0], -1, *x.shape[4:])


def _in_pairs(x: Shaped[Array, "B n s ..."]) -> Shaped[Array, "pairs B s 2 ..."]:
  """The first stair with the last one, the second with the last but one, and so on."""
  half = x.shape[1] // 2
  return jnp.moveaxis(jnp.stack([x[:, :half], x[:, : -half - 1 : -1]], axis=3), 1, 0)


def _out_of_pairs(x: Shaped[Array, "pairs B s 2 ..."]) -> Shaped[Array, "B n s ..."]:
  """Undoes `_in_pairs`."""
  return jnp.moveaxis(jnp.concatenate([x[:, :, :, 0], x[::-1, :, :, 1]]), 0, 1)


def _causal(
  key_segments: Int[Array, "B S"], key_rows: Int[Array, "B S"], segments: Int[Array, "B Q"], rows: Int[Array, "B Q"]
) -> Bool[Array, "B Q S"]:
  """True where a query may read: a key of its segment, not after it in the row."""
  return (segments[:, :, None] == key_segments[:, None]) & (rows[:, :, None] >= key_rows[:, None])


def packed_selected_attention(
  queries: Float[Array, "B T H m"],
  latents: Float[Array, "B T m"],
  selection: Int[Array, "B T k"],
  rank: int,
  scale: float,
  layout: Layout,
) -> Float[Array, "B T H R"]:
  """`selected_attention` of absorbed queries over the latents of their row; heads over the axes of "heads"."""
  local = selected_attention
  if layout.platform == "tpu":  # imported here: elsewhere nobody needs Pallas
    from sao_jax.models.attention.selected_ranges import ranged_attention as local

  if not layout.is_sharded:
    return local(queries, latents, selection, rank, scale)

  def attend(queries: jax.Array, latents: jax.Array, selection: jax.Array) -> jax.Array:
    return local(queries, gather_sequence(latents, layout), selection, rank, scale)

  heads, tokens = layout.spec("batch", "sequence", "heads", None), layout.spec("batch", "sequence", None)
  specs = (heads, tokens, tokens)
  return jax.shard_map(attend, mesh=layout.mesh, in_specs=specs, out_specs=heads, check_vma=False)(
    queries, latents, selection
  )
