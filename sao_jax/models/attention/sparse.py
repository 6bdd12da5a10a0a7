"""Sparse attention by a lightning indexer (DSA; report of DeepSeek-V3.2-Exp, eq. 1 and 2).

A few narrow heads score every earlier position for every query, and attention reads the best k of them only. The choice
is discrete: no gradient reaches the indexer, which stays as it was trained before RL. It is deterministic as well (of
equal scores the lower position wins; exact zeros are common behind the ReLU), so that sampler and learner choose alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.attention.selected import block_width, map_blocks
from sao_jax.models.attention.top_positions import (
  count_at_least,
  first_of,
  kth_by_counting,
  pack_chosen,
  readable_keys,
  top_positions,
  whole_tiles,
)
from sao_jax.models.linear import layer_norm, linear
from sao_jax.models.rope import apply_interleaved_rope
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs

INDEXER = ("q", "k", "k_norm", "k_norm_bias", "weights")
INDEXER_NORM_EPS = 1e-6
BLOCK_BYTES = 20 * 2**20  # of the scores of one block of queries


class Index(NamedTuple):
  """Queries, head weights and keys that an indexer makes of the tokens of a call: I heads of width i, one key for all.

  Attributes:
    queries: [B, T, I, i].
    weights: fp32, one of each head for every query; they contain the scale of the scores.
    keys: [B, T, i].
  """

  queries: Float[Array, "B T I i"]
  weights: Float[Array, "B T I"]
  keys: Float[Array, "B T i"]


def indexer_specs(config: ModelConfig) -> Specs:
  """The parameters of one indexer."""
  spec = functools.partial(ParamSpec, dtype=config.param_dtype, stddev=config.initializer_range)
  heads, width = config.index_num_heads, config.index_head_dim
  return {
    "q": spec((config.q_lora_rank, heads, width), ("latent", None, None)),
    "k": spec((config.d_model, width), ("embed", None)),
    "k_norm": spec((width,), (None,), "ones", compute_dtype="float32"),
    "k_norm_bias": spec((width,), (None,), "zeros", compute_dtype="float32"),
    "weights": spec((config.d_model, heads), ("embed", None), compute_dtype="float32"),
  }


def indexer_paths(config: ModelConfig) -> frozenset[str]:
  """The full names of all indexer parameters, which training leaves alone in the policy and in the critic."""
  return frozenset(f"indexer_layers/{name}" for name in INDEXER) if config.index_topk else frozenset()


def is_full(config: ModelConfig) -> tuple[bool, ...]:
  """For every layer: does it have an indexer of its own? The others read what the last one that has chose."""
  return tuple(kind == "full" for kind in config.indexer_types) or (True,) * config.num_layers


@jax.named_scope("indexer")
def index(
  params: Params,
  x: Float[Array, "B T D"],
  compressed: Float[Array, "B T Q"],
  table: tuple[Array, Array],
  config: ModelConfig,
  layout: Layout = ONE_DEVICE,
) -> Index:
  """Queries, head weights and keys; `compressed` is what the attention's own queries come from.

  The first numbers of queries and keys are rotated, in interleaved pairs: transformers before 5.24 paired halves.
  """
  params, x, compressed = jax.lax.stop_gradient((params, x, compressed))
  rotary_dim = config.qk_rope_head_dim

  def rotate(x: Float[Array, "B T N i"]) -> Float[Array, "B T N i"]:
    rotary, plain = jnp.split(x, [rotary_dim], axis=-1)
    return jnp.concatenate([apply_interleaved_rope(rotary, table), plain], axis=-1)

  keys = layer_norm(linear(x, params["k"], layout), params["k_norm"], params["k_norm_bias"], INDEXER_NORM_EPS)
  weights = linear(x.astype(jnp.float32), params["weights"], layout, precision=jax.lax.Precision.HIGHEST)
  scale = (config.index_num_heads * config.index_head_dim) ** -0.5
  return Index(rotate(linear(compressed, params["q"], layout)), weights * scale, rotate(keys[:, :, None])[:, :, 0])


def index_scores(
  queries: Float[Array, "B T I i"], weights: Float[Array, "B T I"], keys: Float[Array, "B S i"]
) -> Float[Array, "B T S"]:
  """Σ over heads of weight · relu(query · key), in fp32; the products are of the dtype that queries and keys have."""
  products = jnp.einsum(
    "btih,bsh->btis", queries, keys, precision=exact_precision(keys.dtype), preferred_element_type=jnp.float32
  )
  return jnp.einsum("btis,bti->bts", jax.nn.relu(products), weights, precision=jax.lax.Precision.HIGHEST)


def exact_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
  """Products of fp32 numbers in fp32 on every backend; those of bf16 are exact anyway, and summed in fp32."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


@jax.named_scope("choose")
def choose_positions(
  queries: Float[Array, "B T I i"],
  weights: Float[Array, "B T I"],
  keys: Sequence[Float[Array, "B _ i"]],
  readable: Callable[..., Bool[Array, "B Q S"]],
  num_selected: int,
  *arrays: Int[Array, "B T"],
) -> Int[Array, "B T k"]:
  """The positions that queries of an indexer choose, ascending, then -1 (`top_positions`).

  A block of queries at a time: the scores of a block are gone before the next.

  Args:
    queries: see `Index`.
    weights: see `Index`.
    keys: stretches of keys of all positions; positions count through them.
    readable: (*blocks of `arrays`) -> the positions that a block of queries may read.
    num_selected: k.
    *arrays: what `readable` needs to know of every query.
  """

  def block(queries: jax.Array, weights: jax.Array, *arrays: jax.Array) -> jax.Array:
    scores = jnp.concatenate([index_scores(queries, weights, stretch) for stretch in keys], axis=-1)
    return top_positions(scores, readable(*arrays), num_selected)

  per_query = 4 * queries.shape[0] * sum(stretch.shape[1] for stretch in keys)
  return map_blocks(block, block_width(BLOCK_BYTES // per_query), queries, weights, *arrays)


@jax.named_scope("choose")
def choose_in_pair(
  queries: Float[Array, "B t 2 I i"],
  weights: Float[Array, "B t 2 I"],
  keys: Float[Array, "B S i"],
  readable: Callable[..., Bool[Array, "B Q w"]],
  num_selected: int,
  stairs: int,
  low: Int[Array, ""],
  of_keys: Sequence[Int[Array, "B S"]],
  of_queries: Sequence[Int[Array, "B t 2"]],
) -> Int[Array, "B t 2 k"]:
  """As `choose_positions`, for the queries of two stairs of a row, each of which reads no keys behind its end.

  Of n stairs these are number `low` and number n - 1 - `low`: they read the first `low` + 1 and n - `low` stretches of
  keys, together n + 1, whichever they are. So one program does for all stairs: its arrays hold the stretches of both.

  Args:
    queries: see `Index`; those of the lower stair and those of the other.
    weights: see `Index`.
    keys: of all positions, in `stairs` equal stretches.
    readable: (*stretches of `of_keys`, *blocks of `of_queries`) -> the keys that queries may read.
    num_selected: k.
    stairs: n.
    low: the number of the lower stair.
    of_keys: what `readable` needs to know of every key.
    of_queries: what it needs to know of every query.
  """
  batch, num_keys = keys.shape[:2]
  width = num_keys // stairs

  # The stair and the stretch of keys of each of n + 1 places.
  place = jnp.arange(stairs + 1, dtype=jnp.int32)
  is_upper = place > low
  stretch = jnp.where(is_upper, place - low - 1, place)
  read = lambda x: x.reshape(batch, stairs, width, *x.shape[2:])[:, stretch].reshape(-1, width, *x.shape[2:])
  keys, of_keys = read(keys), [read(x) for x in of_keys]

  def of_place(lower: jax.Array, upper: jax.Array) -> jax.Array:  # [B, ...] of either stair -> [B, places, ...]
    return jnp.where(is_upper.reshape(-1, *[1] * (lower.ndim - 1)), upper[:, None], lower[:, None])

  def of_stairs(x: jax.Array) -> jax.Array:  # [B, places, ...] -> [2, B, stretches, ...], 0 where a stair reads none
    lower = jnp.where(is_upper.reshape(-1, *[1] * (x.ndim - 2)), 0, x)[:, :stairs]
    upper = jnp.pad(x, [(0, 0), (0, stairs // 2)] + [(0, 0)] * (x.ndim - 2))
    return jnp.stack([lower, jax.lax.dynamic_slice_in_dim(upper, low + 1, stairs, 1)])

  def block(*blocks: jax.Array) -> jax.Array:
    flat = (of_place(x[:, :, 0], x[:, :, 1]) for x in blocks)
    queries, weights, *own = (x.reshape(-1, *x.shape[2:]) for x in flat)
    scores = index_scores(queries, weights, keys)
    kept = readable_keys(scores, readable(*of_keys, *own)).reshape(batch, stairs + 1, -1, width)

    # The threshold of every query, by counting in the stretches of its stair.
    def count(bounds: jax.Array) -> jax.Array:
      found = count_at_least(kept, of_place(*bounds))
      upper = jnp.sum(jnp.where(is_upper[:, None, None], found, 0), axis=1)
      return jnp.stack([jnp.sum(found, axis=1) - upper, upper])

    threshold = kth_by_counting(count, (2, *blocks[0].shape[:2]), num_selected)
    above, tied = (of_stairs(bits) for bits in pack_chosen(kept, of_place(*threshold)))
    in_order = lambda bits: jnp.moveaxis(bits, 3, 2).reshape(*threshold.shape, -1, bits.shape[-1])
    chosen = first_of(in_order(above), in_order(tied), num_selected)

    # Positions count through whole tiles of every stretch.
    _, padded = whole_tiles(width)
    chosen = chosen - jnp.where(chosen >= 0, chosen // padded * (padded - width), 0)
    return jnp.moveaxis(chosen, 0, 2)

  per_query = 4 * batch * (stairs + 1) * width
  return map_blocks(block, block_width(BLOCK_BYTES // per_query), queries, weights, *of_queries)
