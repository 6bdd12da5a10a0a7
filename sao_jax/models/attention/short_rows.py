"""Attention of short rows as straight code: two blocks of queries, each with all the keys that it may read at once.

No loop over keys, no running maximum, and nothing is computed behind the last key that a block may read. Scores exist
for one row, kv head and block at a time; the backward pass computes them again.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sao_jax.models.attention.kind import ATTENTION_OUT
from sao_jax.models.attention.row_heads import Keys, Queries, masked_scores
from sao_jax.types import PyTree

SHORT = 128  # tokens of the longest row: of longer ones, loops leave out whole blocks of other segments
MOST_BLOCKS, SMALLEST_BLOCK = 2, 32  # more blocks save another tenth of the time, and take a third longer to compile


class Block(NamedTuple):
  """Queries first ... end - 1, which read no key from `reach` on."""

  first: int
  end: int
  reach: int


def query_blocks(index: Int[np.ndarray, " T"]) -> tuple[Block, ...]:
  """Cuts queries with these indices in their row into blocks.

  >>> query_blocks(np.arange(80))
  (Block(first=0, end=40, reach=40), Block(first=40, end=80, reach=80))
  """
  size = max(-(-len(index) // MOST_BLOCKS), SMALLEST_BLOCK)
  cuts = [(first, min(first + size, len(index))) for first in range(0, len(index), size)]
  return tuple(Block(first, end, int(np.max(index[first:end])) + 1) for first, end in cuts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def short_attention(queries: Queries, keys: Keys, scale: float, blocks: tuple[Block, ...]) -> Float[Array, "N T G w"]:
  """Attention of N pairs of a row and a kv head: all arrays of `queries` and `keys` have a leading axis N."""
  return _forward(queries, keys, scale, blocks)[0]


def _forward(queries: Queries, keys: Keys, scale: float, blocks: tuple[Block, ...]) -> tuple[jax.Array, tuple]:
  """The output, and what the backward pass needs: the inputs, the output, and log Σ exp(score) of every query."""

  def of_block(queries: Queries, keys: Keys) -> tuple[jax.Array, jax.Array]:
    scores = masked_scores(queries, keys, 0, scale)
    largest = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - largest[:, None])
    total = jnp.sum(weights, axis=-1)

    # Weights add up to one.
    out = jnp.dot(weights.astype(keys.v.dtype), keys.v, preferred_element_type=jnp.float32) / total[:, None]
    shape = queries.q.shape[:2]
    return out.astype(keys.v.dtype).reshape(*shape, -1), (largest + jnp.log(total)).reshape(shape)

  def of_pair(pair: tuple[Queries, Keys]) -> tuple[jax.Array, jax.Array]:
    queries, keys = pair
    outs, log_sums = zip(*(of_block(*_of_block(block, queries, keys)) for block in blocks), strict=True)
    return jnp.concatenate(outs), jnp.concatenate(log_sums)

  named = functools.partial(checkpoint_name, name=ATTENTION_OUT)
  out, log_sums = jax.tree.map(named, jax.lax.map(of_pair, (queries, keys)))
  return out, (queries, keys, out, log_sums)


def _backward(scale: float, blocks: tuple[Block, ...], kept: tuple, of_out: jax.Array) -> tuple[Queries, Keys]:
  """The gradients of queries, keys and values, from that of the output; scores are computed once more.

  Scores of keys by queries: two of the three products that read them then run over contiguous memory.
  """
  dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
  rows, columns, inner = (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ())), (((1,), (1,)), ((), ()))

  def of_block(by_token: tuple, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries, out, log_sums, of_out = by_token
    q, out, of_out = (x.reshape(-1, x.shape[-1]) for x in (queries.q, out, of_out))

    # The gradient of softmax: weight · (gradient of the weight - its mean over the keys).
    mean = jnp.sum(out.astype(jnp.float32) * of_out.astype(jnp.float32), axis=-1)
    weights = jnp.exp(masked_scores(queries, keys, 0, scale, by_key=True) - log_sums.reshape(-1))
    of_scores = (weights * (dot(keys.v, of_out, inner) - mean)).astype(q.dtype)

    of_q = dot(of_scores, keys.k, columns) * scale
    of_k, of_v = dot(of_scores, q, rows) * scale, dot(weights.astype(of_out.dtype), of_out, rows)
    return of_q.astype(q.dtype).reshape(queries.q.shape), of_k, of_v

  def of_pair(pair: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys, *by_token = pair
    parts = (of_block(*_of_block(block, tuple(by_token), keys)) for block in blocks)
    of_q, of_k, of_v = zip(*parts, strict=True)

    # A key's gradients are sums over the blocks that read it.
    whole = lambda part: jnp.pad(part, ((0, keys.k.shape[0] - part.shape[0]), (0, 0)))
    of_k, of_v = sum(map(whole, of_k)), sum(map(whole, of_v))
    return jnp.concatenate(of_q), of_k.astype(keys.k.dtype), of_v.astype(keys.v.dtype)

  # One pair of a row and a kv head after the other.
  queries, keys, out, log_sums = kept
  of_q, of_k, of_v = jax.lax.map(of_pair, (keys, queries, out, log_sums, of_out))
  return Queries(of_q, None, None), Keys(of_k, of_v, None)


short_attention.defvjp(_forward, _backward)


def _of_block(block: Block, by_token: PyTree, keys: Keys) -> tuple[PyTree, Keys]:
  """The queries of a block, with whatever else there is of each, and the keys that they may read."""
  cut = lambda first, end: lambda x: x[first:end]
  return jax.tree.map(cut(block.first, block.end), by_token), jax.tree.map(cut(0, block.reach), keys)
