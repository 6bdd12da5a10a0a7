"""softmax(q kᵀ) v over packed rows in blocks: memory grows with T, not with T · T (flash attention, arXiv 2205.14135).

A block of queries meets one block of keys after the other, with a running maximum and sum. The backward pass computes
the scores again, from the logarithm of those sums. Blocks above the diagonal and blocks of other segments are skipped.

Plain jax, one row and one kv head at a time: this is what CPUs run, and what kernels are compared with. Short rows are
computed without loops: see `short_rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sao_jax.models.attention.kind import ATTENTION_OUT
from sao_jax.models.attention.row_heads import LOWEST, Keys, Queries, masked_scores
from sao_jax.models.attention.short_rows import SHORT, query_blocks, short_attention
from sao_jax.types import PyTree

BLOCK = 128  # the most queries, and the most keys, of a block: the fastest on a CPU for rows of 256 tokens and more


def blockwise_attention(
  q: Float[Array, "B T H h"],
  k: Float[Array, "B S K h"],
  v: Float[Array, "B S K v"],
  q_segments: Int[Array, "B T"],
  kv_segments: Int[Array, "B S"],
  index: Int[Array | np.ndarray, "T"],
  *,
  scale: float,
  block: int = BLOCK,
) -> Float[Array, "B T H v"]:
  """softmax(q kᵀ · scale) v, causal within segments; query head i reads kv head i // (H / K). Softmax in fp32.

  Args:
    q: queries, of some tokens of the rows.
    k: keys of whole rows.
    v: values of whole rows.
    q_segments: segments of the queries.
    kv_segments: segments of the keys.
    index: for every query its index in the row; it reads the keys of its segment up to this one. Where numpy knows it,
      short rows are straight code.
    scale: factor on the scores.
    block: the most queries, and the most keys, that meet at a time.
  """
  batch, length, heads, dim = q.shape
  kv_heads = k.shape[2]
  group = heads // kv_heads

  # One entry for each row and kv head, blocks of equal length; what fills the last one is cut off or never read.
  def pairs(x: jax.Array) -> jax.Array:  # [B, S, K, ...] -> [B · K, S, ...]
    return jnp.moveaxis(x, 2, 1).reshape(batch * kv_heads, x.shape[1], *x.shape[3:])

  def of_pairs(segments: jax.Array, size: int) -> jax.Array:
    return jnp.repeat(_fill(segments, 1, size, "edge"), kv_heads, axis=0)

  def of_heads(numbers: jax.Array) -> jax.Array:  # [..., T] -> [B · K, T, G]
    return jnp.broadcast_to(numbers[..., None], (batch * kv_heads, numbers.shape[-1], group))

  short = isinstance(index, np.ndarray) and k.shape[1] <= SHORT
  q_size, kv_size = (1, 1) if short else (_block_size(length, block), _block_size(k.shape[1], block))
  queries = Queries(
    _fill(pairs(q.reshape(batch, length, kv_heads, group, dim)), 1, q_size),
    of_heads(of_pairs(q_segments, q_size)),
    of_heads(_fill(index, 0, q_size, "edge")),
  )
  keys = Keys(_fill(pairs(k), 1, kv_size), _fill(pairs(v), 1, kv_size), of_pairs(kv_segments, kv_size))

  if short:
    out = short_attention(queries, keys, scale, query_blocks(index))
  else:
    out = _attention(queries, keys, scale, q_size, kv_size)[:, :length]  # [B · K, T, G, v]
  out = jnp.moveaxis(out.reshape(batch, kv_heads, *out.shape[1:]), 1, 2)
  return out.reshape(batch, length, heads, -1)


def blockwise_shard(
  q: Float[Array, "B t H h"],
  k: Float[Array, "B T K h"],
  v: Float[Array, "B T K v"],
  q_segments: Int[Array, "B t"],
  kv_segments: Int[Array, "B T"],
  order: np.ndarray,
  shard: jax.Array | int,
  scale: float,
) -> Float[Array, "B t H v"]:
  """`blockwise_attention` as one device of a mesh computes it; see `shards.ShardAttention`."""
  index = order[shard] if isinstance(shard, int) else jnp.asarray(order)[shard]
  return blockwise_attention(q, k, v, q_segments, kv_segments, index, scale=scale)


def _block_size(length: int, most: int) -> int:
  """The size of blocks that are as equal as they can be."""
  return -(-length // -(-length // most))


def _fill(x: jax.typing.ArrayLike, axis: int, size: int, mode: str = "constant") -> jax.Array:
  """`x` with its axis filled up to whole blocks."""
  x = jnp.asarray(x)
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, -x.shape[axis] % size)
  return jnp.pad(x, pads, mode=mode) if pads[axis][1] else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attention(queries: Queries, keys: Keys, scale: float, q_size: int, kv_size: int) -> Float[Array, "N T G w"]:
  """Attention of N pairs of a row and a kv head: all arrays of `queries` and `keys` have a leading axis N."""
  return _forward(queries, keys, scale, q_size, kv_size)[0]


def _forward(queries: Queries, keys: Keys, scale: float, q_size: int, kv_size: int) -> tuple[jax.Array, tuple]:
  """The output, and what the backward pass needs: the inputs, the output, and log Σ exp(score) of every query."""

  def of_block(keys: Keys, block: Queries) -> tuple[jax.Array, jax.Array]:
    def meet(state: tuple, keys: Keys, first: jax.Array | int) -> tuple:
      largest, total, out = state
      scores = masked_scores(block, keys, first, scale)

      # What was summed under an older maximum is scaled down to the new one.
      new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
      weights, shrink = jnp.exp(scores - new_largest[:, None]), jnp.exp(largest - new_largest)
      weighted = jnp.dot(weights.astype(keys.v.dtype), keys.v, preferred_element_type=jnp.float32)
      return new_largest, total * shrink + jnp.sum(weights, axis=-1), out * shrink[:, None] + weighted

    # All heads of a block of queries are rows of one product.
    shape = block.q.shape[:2]
    rows = shape[0] * shape[1]
    start = (jnp.full(rows, LOWEST), jnp.zeros(rows), jnp.zeros((rows, keys.v.shape[-1])))
    largest, total, out = _over_keys(meet, start, block, keys, kv_size)

    # Weights add up to one.
    out = (out / total[:, None]).astype(keys.v.dtype)
    return out.reshape(*shape, -1), (largest + jnp.log(total)).reshape(shape)

  def of_pair(pair: tuple[Queries, Keys]) -> tuple[jax.Array, jax.Array]:
    queries, keys = pair
    return _over_queries(lambda _, block: (None, of_block(keys, block)), None, queries, q_size)[1]

  named = functools.partial(checkpoint_name, name=ATTENTION_OUT)
  out, log_sums = jax.tree.map(named, jax.lax.map(of_pair, (queries, keys)))
  return out, (queries, keys, out, log_sums)


def _backward(scale: float, q_size: int, kv_size: int, kept: tuple, of_out: jax.Array) -> tuple[Queries, Keys]:
  """The gradients of queries, keys and values, from that of the output; every block of scores is computed once more."""
  dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
  rows, columns, inner = (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ())), (((1,), (1,)), ((), ()))

  def of_block(of_keys: tuple, keys: Keys, block: tuple) -> tuple[tuple, jax.Array]:
    queries, out, log_sums, of_out = block
    flat = lambda x: x.reshape(-1, x.shape[-1])
    q, out, of_out, log_sums = flat(queries.q), flat(out), flat(of_out), log_sums.reshape(-1, 1)

    # The gradient of softmax: weight · (gradient of the weight - its mean over the keys).
    mean = jnp.sum(out.astype(jnp.float32) * of_out.astype(jnp.float32), axis=-1, keepdims=True)

    def meet(state: tuple, keys: Keys, first: jax.Array | int) -> tuple:
      of_q, of_k, of_v = state
      # The weights again, and what their change would do to the output.
      weights = jnp.exp(masked_scores(queries, keys, first, scale) - log_sums)
      of_scores = (weights * (dot(of_out, keys.v, inner) - mean) * scale).astype(q.dtype)

      # The keys' gradients add to what other blocks of queries give them.
      of_k = _add_at(of_k, dot(of_scores, q, columns), first)
      of_v = _add_at(of_v, dot(weights.astype(of_out.dtype), of_out, columns), first)
      return of_q + dot(of_scores, keys.k, rows), of_k, of_v

    of_q, *of_keys = _over_keys(meet, (jnp.zeros(q.shape), *of_keys), queries, keys, kv_size)
    return tuple(of_keys), of_q.astype(q.dtype).reshape(queries.q.shape)

  def of_pair(pair: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys, *by_token = pair
    start = (jnp.zeros(keys.k.shape), jnp.zeros(keys.v.shape))
    (of_k, of_v), of_q = _over_queries(
      lambda of_keys, block: of_block(of_keys, keys, block), start, tuple(by_token), q_size
    )
    return of_q, of_k.astype(keys.k.dtype), of_v.astype(keys.v.dtype)

  # One pair of a row and a kv head after the other.
  queries, keys, out, log_sums = kept
  of_q, of_k, of_v = jax.lax.map(of_pair, (keys, queries, out, log_sums, of_out))
  return Queries(of_q, None, None), Keys(of_k, of_v, None)


_attention.defvjp(_forward, _backward)


def _over_queries(
  step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], start: PyTree, by_token: PyTree, size: int
) -> tuple[PyTree, PyTree]:
  """Scans over blocks of queries: `step(state, block) -> (state, output)`; leaves of `by_token` are [T, ...]."""
  length = jax.tree.leaves(by_token)[0].shape[0]
  if length == size:
    return step(start, by_token)
  blocks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), by_token)
  state, outputs = jax.lax.scan(step, start, blocks)
  return state, jax.tree.map(lambda x: x.reshape(length, *x.shape[2:]), outputs)


def _over_keys(
  meet: Callable[[PyTree, Keys, jax.Array | int], PyTree], start: PyTree, queries: Queries, keys: Keys, size: int
) -> PyTree:
  """Loops over the blocks of keys that a block of queries may read: `meet(state, keys, first key) -> state`."""
  if keys.k.shape[0] == size:
    return meet(start, keys, 0)

  # Between the first and the last block with such a key; segments are compared by their bounds.
  segments = keys.segments.reshape(-1, size)
  in_segment = (jnp.max(segments, axis=1) >= jnp.min(queries.segments)) & (
    jnp.min(segments, axis=1) <= jnp.max(queries.segments)
  )
  numbers = jnp.arange(segments.shape[0], dtype=jnp.int32)
  readable = in_segment & (numbers * size <= jnp.max(queries.index))
  first = jnp.min(jnp.where(readable, numbers, segments.shape[0]))
  last = jnp.max(jnp.where(readable, numbers, -1))

  # How many blocks these are is known when the program runs.
  def step(number: jax.Array, state: PyTree) -> PyTree:
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size)
    return meet(state, jax.tree.map(part, keys), number * size)

  return jax.lax.fori_loop(first, last + 1, step, start)


def _add_at(x: Float[Array, "S w"], part: Float[Array, "s w"], first: jax.Array | int) -> Float[Array, "S w"]:
  """`x` with `part` added to its rows from `first` on."""
  if x.shape == part.shape:
    return x + part
  old = jax.lax.dynamic_slice_in_dim(x, first, part.shape[0])
  return jax.lax.dynamic_update_slice_in_dim(x, old + part, first, axis=0)
