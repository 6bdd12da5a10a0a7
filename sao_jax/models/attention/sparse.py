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
from sao_jax.models.attention.top_positions import top_positions
from sao_jax.models.linear import layer_norm, linear
from sao_jax.models.rope import apply_interleaved_rope
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, ParamSpec, Specs

INDEXER = ("q", "k", "k_norm", "k_norm_bias", "weights")
INDEXER_NORM_EPS = 1e-6
BLOCK_BYTES = 16 * 2**20  # of the scores of one block of queries


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
