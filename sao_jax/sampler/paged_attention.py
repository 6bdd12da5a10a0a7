"""Attention of ragged queries over a cache in pages: a Pallas kernel on a TPU, plain jax elsewhere.

Queries of several sequences, prompts and single tokens alike, lie one behind the other in one array. Their keys and
values lie in pages, anywhere in a pool that all sequences share; a table says where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

POSITIONS_AT_A_TIME = 1024  # of the cache, in one step of the loop below
TOKENS_PER_ROW = 4  # with more queries per sequence, its pages are read once for all of them

# Sizes of the kernel's blocks. Its own table looks at the default device, which need not be the one compiled for.
KERNEL_POSITIONS = 1024
KERNEL_QUERIES = 16
KERNEL_VMEM_BYTES = 64 * 2**20

# (pages of G sequences [G, p]) -> their keys [G, C, K, h] and values [G, C, K, v]
ReadPages = Callable[[Int[Array, "G p"]], tuple[jax.Array, jax.Array]]


def paged_attention(platform: str) -> Callable[..., jax.Array]:
  """The implementation of `ragged_paged_attention` for a platform, all with its signature."""
  return _kernel if platform == "tpu" else ragged_paged_attention


def _kernel(
  q: jax.Array,
  kv_pages: jax.Array,
  kv_lens: jax.Array,
  page_indices: jax.Array,
  cu_q_lens: jax.Array,
  num_seqs: jax.Array,
  *,
  sm_scale: float,
) -> jax.Array:
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernel  # pulls in Pallas

  # As many pages at a time as make up a block, which a short table may not have.
  pages_per_block = max(1, min(page_indices.shape[1], KERNEL_POSITIONS // kv_pages.shape[1]))
  out = kernel.ragged_paged_attention(
    q.astype(kv_pages.dtype),
    kv_pages,
    kv_lens,
    page_indices,
    cu_q_lens,
    num_seqs,
    sm_scale=sm_scale,
    num_kv_pages_per_block=pages_per_block,
    num_queries_per_block=min(KERNEL_QUERIES, q.shape[0]),
    vmem_limit_bytes=KERNEL_VMEM_BYTES,
  )
  # Queries of no sequence come back as whatever was in memory.
  real = jnp.arange(q.shape[0], dtype=jnp.int32) < cu_q_lens[num_seqs[0]]
  return jnp.where(real[:, None, None], out, 0).astype(q.dtype)


def ragged_paged_attention(
  q: Float[Array, "N H h"],
  kv_pages: Float[Array, "P c n h"],
  kv_lens: Int[Array, " R"],
  page_indices: Int[Array, "R p"],
  cu_q_lens: Int[Array, " R1"],
  num_seqs: Int[Array, " 1"],
  *,
  sm_scale: float,
) -> Float[Array, "N H h"]:
  """Attention of the queries of every sequence over all of its cache up to their own position.

  The signature and its meaning are those of jax.experimental.pallas.ops.tpu.ragged_paged_attention. Scores and softmax
  in fp32.

  Args:
    q: sequence r has queries cu_q_lens[r] ... cu_q_lens[r + 1] - 1, for the last positions of its cache.
    kv_pages: pages of c positions; the key of head k is entry 2k of a position, its value entry 2k + 1, n in all.
    kv_lens: positions of every sequence, with those of its queries.
    page_indices: the pages of every sequence, in order; what lies behind its last position is any valid index.
    cu_q_lens: cumulative numbers of queries.
    num_seqs: the number of sequences; what the arguments say of others is not read.
    sm_scale: factor of the scores.

  Returns:
    The weighted values; 0 for queries of no sequence.
  """
  keys = kv_pages.shape[2] // 2

  def read(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    both = kv_pages[pages].reshape(pages.shape[0], -1, keys, 2, q.shape[-1]).astype(q.dtype)
    return both[..., 0, :], both[..., 1, :]

  return attend_pages(q, read, kv_pages.shape[1], kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=sm_scale)


def attend_pages(
  q: Float[Array, "N H h"],
  read: ReadPages,
  page_size: int,
  kv_lens: Int[Array, " R"],
  page_indices: Int[Array, "R p"],
  cu_q_lens: Int[Array, " R1"],
  num_seqs: Int[Array, " 1"],
  *,
  sm_scale: float,
) -> Float[Array, "N H v"]:
  """`ragged_paged_attention` for whatever `read` makes of pages of `page_size` positions."""
  loop = functools.partial(_online_softmax, read=read, page_size=page_size, sm_scale=sm_scale)
  return by_sequence(loop, q, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs)


def by_sequence(
  fn: Callable[..., Shaped[Array, "G T ..."]],
  *arrays: Shaped[Array, "N ..."],
  kv_lens: Int[Array, " R"],
  page_indices: Int[Array, "R p"],
  cu_q_lens: Int[Array, " R1"],
  num_seqs: Int[Array, " 1"],
) -> Shaped[Array, "N ..."]:
  """Applies `fn` to groups of queries that read the same pages; 0 for queries of no sequence.

  Args:
    fn: (*arrays [G, T, ...], pages [G, p], limits [G, T]) -> [G, T, ...]; query t of group g may read the first
      limits[g, t] positions. Its result for a limit of 0 is not used.
    *arrays: what it needs of every query.
    kv_lens: see `ragged_paged_attention`, as for the others.
  """
  num_tokens = arrays[0].shape[0]
  sequence, limits = _readable(num_tokens, kv_lens, cu_q_lens, num_seqs[0])
  keep = lambda mask, new, old: jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old)

  # Few queries each: every query reads the pages of its own sequence.
  if num_tokens <= TOKENS_PER_ROW * kv_lens.shape[0]:
    out = fn(*(x[:, None] for x in arrays), page_indices[sequence], limits[:, None])[:, 0]
    return keep(limits > 0, out, 0)

  # Many queries: so does the last one of every sequence, of most of them the only one.
  used = jnp.arange(kv_lens.shape[0], dtype=jnp.int32) < num_seqs[0]
  last = jnp.where(used, cu_q_lens[1:] - 1, num_tokens)
  of_last = fn(*(x[last][:, None] for x in arrays), page_indices, limits[last][:, None])[:, 0]
  out = jnp.zeros((num_tokens, *of_last.shape[1:]), of_last.dtype).at[last].set(of_last, mode="drop")

  # The pages of the others, one after the other, are read once for all queries.
  several = used & (cu_q_lens[1:] - cu_q_lens[:-1] > 1)
  order = jnp.argsort(~several, stable=True)

  def of_one(index: jax.Array, out: jax.Array) -> jax.Array:
    row = order[index]
    own = jnp.where(sequence == row, limits, 0)
    return keep(own > 0, fn(*(x[None] for x in arrays), page_indices[row][None], own[None])[0], out)

  return jax.lax.fori_loop(0, jnp.sum(several, dtype=jnp.int32), of_one, out)


def _readable(
  num_tokens: int, kv_lens: Int[Array, " R"], cu_q_lens: Int[Array, " R1"], num_seqs: Int[Array, ""]
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
  """The sequence of every query, and how many positions of it the query reads: 0 for queries of no sequence."""
  known = jnp.arange(cu_q_lens.shape[0], dtype=jnp.int32) <= num_seqs
  ends = jnp.where(known, cu_q_lens, cu_q_lens[num_seqs])
  token = jnp.arange(num_tokens, dtype=jnp.int32)
  sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right").astype(jnp.int32) - 1, kv_lens.shape[0] - 1)
  limits = kv_lens[sequence] - (ends[sequence + 1] - token) + 1
  return sequence, jnp.where(token < ends[-1], limits, 0)


def _online_softmax(
  q: Float[Array, "G T H h"],
  page_indices: Int[Array, "G p"],
  limits: Int[Array, "G T"],
  *,
  read: ReadPages,
  page_size: int,
  sm_scale: float,
) -> Float[Array, "G T H v"]:
  """Attention of groups of queries that read the same pages, a few pages at a time: no array grows with the cache.

  Query t of group g reads the first limits[g, t] positions.
  """
  groups, length, heads, _ = q.shape
  pages = max(1, min(page_indices.shape[1], POSITIONS_AT_A_TIME // page_size))
  page_indices = jnp.pad(page_indices, ((0, 0), (0, -page_indices.shape[1] % pages)))
  longest = jnp.max(limits, axis=1)

  # A key head serves several heads of queries.
  keys, values = jax.eval_shape(read, jax.ShapeDtypeStruct((groups, pages), jnp.int32))
  kv_heads = keys.shape[2]
  q = q.reshape(groups, length, kv_heads, -1, q.shape[-1])

  def step(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    peak, total, out = state
    k, v = read(jax.lax.dynamic_slice_in_dim(page_indices, index * pages, pages, axis=1))
    position = index * pages * page_size + jnp.arange(pages * page_size, dtype=jnp.int32)

    # What lies behind a sequence may be another's, and not finite: weight 0 does not make NaN harmless.
    v = jnp.where((position < longest[:, None])[..., None, None], v, 0)
    scores = jnp.einsum("gtkah,gckh->gtkac", q, k, preferred_element_type=jnp.float32) * sm_scale
    inside = (position < limits[..., None])[:, :, None, None]
    scores = jnp.where(inside, scores, -jnp.inf)

    # The sums so far are relative to the peak so far; a query that reads nothing keeps a peak of -inf.
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
    base = jnp.where(jnp.isfinite(new_peak), new_peak, 0)
    weights, shrink = jnp.exp(scores - base[..., None]), jnp.exp(peak - base)
    read_now = jnp.einsum("gtkac,gckv->gtkav", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
    return new_peak, total * shrink + jnp.sum(weights, axis=-1), out * shrink[..., None] + read_now

  # As many steps as the longest sequence has pages for.
  state = (
    jnp.full(q.shape[:-1], -jnp.inf, jnp.float32),
    jnp.zeros(q.shape[:-1], jnp.float32),
    jnp.zeros((*q.shape[:-1], values.shape[-1]), jnp.float32),
  )
  num_steps = -(-jnp.max(longest) // (pages * page_size))
  _, total, out = jax.lax.fori_loop(0, num_steps, step, state)
  out = jnp.where(total[..., None] > 0, out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None], 0)
  return out.astype(q.dtype).reshape(groups, length, heads, -1)
