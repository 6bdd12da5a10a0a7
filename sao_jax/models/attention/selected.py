"""Attention over selected latents: what is not selected is neither read nor multiplied.

Absorbed queries (`latent.absorb`) read whole latents as keys and their compressed part as values, all heads the same k
rows. A block of queries at a time gathers its rows; its scores and rows are gone before the next block. The backward
pass gathers them again, and adds the gradients of latents up in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from sao_jax.models.attention.kind import ATTENTION_OUT

BLOCK_BYTES = 160 * 2**20  # of the latents that one block of queries gathers


def read_selected(
  queries: Float[Array, "B T H m"],
  gather: Callable[[Int[Array, "B Q k"]], Float[Array, "B Q k m"]],
  selection: Int[Array, "B T k"],
  rank: int,
  scale: float,
) -> Float[Array, "B T H R"]:
  """The weighted sums of the selected compressed vectors, a block of queries at a time.

  Args:
    queries: absorbed queries.
    gather: the positions that a block of queries reads -> the latents there. It is asked for selected ones only.
    selection: positions, then -1; every query has at least one.
    rank: R, the compressed numbers of a latent, its first ones.
    scale: factor on the scores.
  """

  def block(queries: jax.Array, selection: jax.Array) -> jax.Array:
    rows = gather(_selected_only(selection))
    weights = _weights(queries, rows, selection >= 0, scale).astype(rows.dtype)
    return _einsum("bthk,btkr->bthr", weights, rows[..., :rank]).astype(queries.dtype)

  return map_blocks(block, _queries_at_a_time(queries, selection), queries, selection)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def selected_attention(
  queries: Float[Array, "B T H m"],
  latents: Float[Array, "B S m"],
  selection: Int[Array, "B T k"],
  rank: int,
  scale: float,
) -> Float[Array, "B T H R"]:
  """`read_selected` from the latents of whole rows, with gradients of queries and latents."""
  return read_selected(queries, functools.partial(_rows, latents), selection, rank, scale)


def _forward(queries: jax.Array, latents: jax.Array, selection: jax.Array, rank: int, scale: float) -> Any:
  """The result, and the arguments for the backward pass."""
  out = checkpoint_name(selected_attention(queries, latents, selection, rank, scale), ATTENTION_OUT)
  return out, (queries, latents, selection)


def _backward(rank: int, scale: float, arguments: tuple[jax.Array, ...], grads: jax.Array) -> tuple[Any, ...]:
  """Gradients of queries and latents, a block of queries at a time; rows and weights are computed again."""
  queries, latents, selection = arguments
  add_rows = jax.vmap(lambda total, positions, rows: total.at[positions].add(rows))

  def block(total: jax.Array, queries: jax.Array, selection: jax.Array, grads: jax.Array) -> tuple[jax.Array, ...]:
    positions = _selected_only(selection)
    rows = _rows(latents, positions)
    weights = _weights(queries, rows, selection >= 0, scale)

    # Through the weighted sum and the softmax.
    of_weights = _einsum("bthr,btkr->bthk", grads, rows[..., :rank])
    mean = jnp.sum(weights * of_weights, axis=-1, keepdims=True)
    of_scores = (weights * (of_weights - mean) * scale).astype(queries.dtype)

    # A latent is a key with all its numbers, a value with the first ones.
    of_queries = _einsum("bthk,btkm->bthm", of_scores, rows).astype(queries.dtype)
    as_values = _einsum("bthk,bthr->btkr", weights.astype(queries.dtype), grads)
    of_rows = _einsum("bthk,bthm->btkm", of_scores, queries).at[..., :rank].add(as_values)
    flat = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
    return add_rows(total, flat(positions), flat(of_rows)), of_queries

  total = jnp.zeros(latents.shape, jnp.float32)
  width = _queries_at_a_time(queries, selection)
  total, of_queries = scan_blocks(block, width, total, queries, selection, grads)
  return of_queries, total.astype(latents.dtype), None


selected_attention.defvjp(_forward, _backward)


def block_width(most: int) -> int:
  """The largest power of two up to `most`, at least 8: long rows are then whole blocks, and nothing is filled up."""
  return max(1 << max(most, 1).bit_length() - 1, 8)


def map_blocks(function: Callable[..., jax.Array], width: int, *arrays: Array) -> Array:
  """`function` of blocks of `width` tokens of every array [B, T, ...]; its results [B, width, ...] are joined."""
  return scan_blocks(lambda carry, *blocks: (carry, function(*blocks)), width, None, *arrays)[1]


def scan_blocks(
  function: Callable[..., tuple[Any, Array]], width: int, carry: Any, *arrays: Array
) -> tuple[Any, Array]:
  """As `map_blocks`, with a carry from block to block: (carry, *blocks) -> (carry, result).

  The last block is filled up with zeros, whose results are dropped; a carry must not count them.
  """
  length = arrays[0].shape[1]
  if width >= length:
    return function(carry, *arrays)
  count = -(-length // width)

  def split(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [count, B, width, ...]
    x = jnp.pad(x, ((0, 0), (0, count * width - length)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)

  step = lambda carry, blocks: function(carry, *blocks)
  carry, results = jax.lax.scan(step, carry, tuple(split(x) for x in arrays))
  return carry, jnp.moveaxis(results, 0, 1).reshape(results.shape[1], -1, *results.shape[3:])[:, :length]


def _queries_at_a_time(queries: Float[Array, "B T H m"], selection: Int[Array, "B T k"]) -> int:
  """The queries of a row whose latents fit in a block."""
  per_query = selection.shape[0] * selection.shape[2] * queries.shape[3] * queries.dtype.itemsize
  return block_width(BLOCK_BYTES // per_query)


def _selected_only(selection: Int[Array, "B T k"]) -> Int[Array, "B T k"]:
  """The selection with the query's first position in place of -1: no foreign latent, which may not be finite."""
  return jnp.where(selection >= 0, selection, selection[..., :1])


def _rows(latents: Float[Array, "B S m"], positions: Int[Array, "B T k"]) -> Float[Array, "B T k m"]:
  """The latents at these positions."""
  return jax.vmap(lambda latents, positions: jnp.take(latents, positions, axis=0, mode="clip"))(latents, positions)


def _weights(
  queries: Float[Array, "B T H m"], rows: Float[Array, "B T k m"], readable: Bool[Array, "B T k"], scale: float
) -> Float[Array, "B T H k"]:
  """softmax(scores) over the readable rows, in fp32."""
  scores = _einsum("bthm,btkm->bthk", queries, rows) * scale
  return jax.nn.softmax(jnp.where(readable[:, :, None], scores, jnp.finfo(jnp.float32).min), axis=-1)


def _einsum(formula: str, *arrays: Array) -> Array:
  """A product with sums in fp32."""
  return jnp.einsum(formula, *arrays, preferred_element_type=jnp.float32)
