"""Attention over selected latents on a TPU: kernels for ranges of positions, and what puts their results together.

Equal to `selected.selected_attention`, its reference. Long rows go a piece at a time, so that the results of all ranges
take bounded memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sao_jax.models.attention.kind import ATTENTION_OUT
from sao_jax.models.attention.latent_words import Form, Ranges, pack, split_positions
from sao_jax.models.attention.selected import block_width
from sao_jax.models.attention.selected_kernels import PARTS, QUERIES, backward_kernel, block_bytes, forward_kernel

PIECE_BYTES = 2**30  # of the results of all ranges for the queries of a piece


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def ranged_attention(
  queries: Float[Array, "B T H m"],
  latents: Float[Array, "B S m"],
  selection: Int[Array, "B T k"],
  rank: int,
  scale: float,
  interpret: bool = False,
) -> Float[Array, "B T H R"]:
  """As `selected.selected_attention`, for ascending selections."""
  return _forward(queries, latents, selection, rank, scale, interpret)[0]


def _forward(
  queries: jax.Array, latents: jax.Array, selection: jax.Array, rank: int, scale: float, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """The result, and what the backward pass reads; named, where a policy of rematerialisation sees it."""
  form = Form(rank, latents.shape[2], latents.dtype)
  ranges = split_positions(latents.shape[1], form.word_bytes, block_bytes(queries, form))
  words = pack(latents, form, ranges.count * ranges.keys)

  def piece(_: None, queries: jax.Array, selection: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
    blocks, bounds = _in_blocks(selection, ranges)
    partial, logs = forward_kernel(queries, words, blocks, bounds, ranges, form, scale, interpret=interpret)

    # The softmax over all ranges, from those within each.
    logs = logs.swapaxes(3, 4).reshape(*partial.shape[:4])
    logsumexp = jax.nn.logsumexp(logs, axis=0)
    shares = jnp.exp(logs - logsumexp)
    out = jnp.sum(partial * shares[..., None], axis=0)
    return None, (out.astype(queries.dtype), logsumexp)

  _, (out, logsumexp) = _in_pieces(piece, None, ranges, queries, selection)
  out, logsumexp = (checkpoint_name(x, ATTENTION_OUT) for x in (out, logsumexp))
  return out, (queries, latents, selection, out, logsumexp)


def _backward(
  rank: int, scale: float, interpret: bool, kept: tuple[jax.Array, ...], of_out: jax.Array
) -> tuple[Any, ...]:
  """Gradients of queries and latents."""
  queries, latents, selection, out, logsumexp = kept
  form = Form(rank, latents.shape[2], latents.dtype)
  bytes_per_key = form.word_bytes + form.gradient_bytes
  ranges = split_positions(latents.shape[1], bytes_per_key, block_bytes(queries, form))
  words = pack(latents, form, ranges.count * ranges.keys)
  mean = jnp.einsum("bthr,bthr->bth", out.astype(jnp.float32), of_out.astype(jnp.float32))

  def piece(total: jax.Array, queries: jax.Array, selection: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    of_out, *sums = rest
    blocks, bounds = _in_blocks(selection, ranges)
    # [B, T, H] -> [B, N, H, Q], side by side.
    sums = [x.reshape(*blocks.shape[:3], -1).swapaxes(2, 3) for x in sums]
    sums = jnp.concatenate(sums, axis=-1)
    arrays = queries, words, blocks, bounds, of_out, sums, total
    partial, *total = backward_kernel(*arrays, ranges, form, scale, interpret=interpret)
    return tuple(total), jnp.sum(partial, axis=0, dtype=jnp.float32).astype(queries.dtype)

  # Each part of the queries adds up its own.
  shapes = (*words.compressed.shape[:2], rank), words.rotary.shape
  total = tuple(jnp.zeros((PARTS * rows, *shape), jnp.float32) for rows, *shape in shapes)
  of_out = of_out.astype(queries.dtype)
  total, of_queries = _in_pieces(piece, total, ranges, queries, selection, of_out, logsumexp, mean)

  # Latents that share a row of lanes, apart again.
  of_compressed, of_rotary = (sum(jnp.split(x, PARTS)) for x in total)
  of_rotary = of_rotary.reshape(*of_compressed.shape[:2], -1)[..., : form.width - rank]
  of_latents = jnp.concatenate([of_compressed, of_rotary], axis=-1)[:, : latents.shape[1]]
  return of_queries, of_latents.astype(latents.dtype), None


ranged_attention.defvjp(_forward, _backward)


def _in_blocks(selection: Int[Array, "B t k"], ranges: Ranges) -> tuple[Int[Array, "B N Q k"], Int[Array, "B N Q _"]]:
  """The selection in blocks of queries, and the indices in it at which each range begins; last, where all end."""
  blocks = selection.reshape(selection.shape[0], -1, QUERIES, selection.shape[2])
  before = lambda end: jnp.sum((blocks >= 0) & (blocks < end), axis=-1, dtype=jnp.int32)
  return blocks, jnp.stack([before(number * ranges.keys) for number in range(ranges.count + 1)], axis=-1)


def _in_pieces(
  piece: Any, carry: Any, ranges: Ranges, queries: jax.Array, selection: jax.Array, *rest: jax.Array
) -> Any:
  """`piece` (carry, *stretches of the arrays [B, T, ...]) -> (carry, results), one stretch after the other.

  The last one is filled up with queries that read nothing.
  """
  batch, length, heads, width = queries.shape
  per_query = ranges.count * batch * heads * width * queries.dtype.itemsize
  least = PARTS * QUERIES
  size = min(max(block_width(PIECE_BYTES // per_query), least), length + -length % least)
  count = -(-length // size)

  def split(x: jax.Array, fill: int = 0) -> jax.Array:  # [B, T, ...] -> [count, B, size, ...]
    pads = ((0, 0), (0, count * size - length)) + ((0, 0),) * (x.ndim - 2)
    x = jnp.pad(x, pads, constant_values=fill)
    return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

  def join(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :length]

  arrays = split(queries), split(selection, -1), *map(split, rest)
  if count == 1:
    carry, results = piece(carry, *(x[0] for x in arrays))
    return carry, jax.tree.map(lambda x: x[:, :length], results)
  carry, results = jax.lax.scan(lambda carry, stretches: piece(carry, *stretches), carry, arrays)
  return carry, jax.tree.map(join, results)
