"""The backward pass of splash attention: one kernel, which computes scores and weights once for all three gradients.

Two kernels, one for queries and one for keys and values, multiply seven times where five are enough. jax's fused kernel
goes over blocks of keys, and cannot add up the gradient of queries meanwhile: it writes a partial one for every block
of keys that it holds. So that these stay small, a block is as large as fits into VMEM, and keys pass in chunks of
blocks: after each chunk its partial gradients are added up in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

PARTIAL_BYTES = 2**30  # of the partial gradients of queries, at most; a single block may need more


class GradientBlocks(NamedTuple):
  """The largest blocks of the backward kernel.

  Attributes:
    queries: that are multiplied at a time.
    keys: that are multiplied at a time.
    held: keys that stay in VMEM while queries pass; each has a partial gradient of all queries.
  """

  queries: int
  keys: int
  held: int


# Of heads as wide as the lanes of a TPU, and of wider ones. Larger blocks of fp32 do not fit into VMEM.
NARROW_HEADS = GradientBlocks(1024, 512, 2048)
WIDE_HEADS = GradientBlocks(512, 512, 1024)


def is_causal(q_index: Any, kv_index: Any) -> Any:
  """May these queries read these keys? Inside the kernels, for every block that they visit."""
  return q_index >= kv_index


def splash_gradients(
  blocks: Any,
  tables: Any,
  q: Float[Array, "B H t h"],
  k: Float[Array, "B K T h"],
  v: Float[Array, "B K T v"],
  segments: Any,
  out: Float[Array, "B H t v"],
  logsumexp: Float[Array, "B H t"],
  of_out: Float[Array, "B H t v"],
  *,
  interpret: bool,
) -> tuple[Float[Array, "B H t h"], Float[Array, "B K T h"], Float[Array, "B K T v"]]:
  """The gradients of queries, keys and values.

  A partial gradient of queries has their dtype; so have the scores' gradients that it is made of, one rounding each.

  Args:
    blocks: jax's sizes of blocks.
    tables: of the backward kernel, for all keys: with an entry for every block, visited or not.
    q: queries, scaled.
    k: keys.
    v: values.
    segments: of queries and keys.
    out: what the forward pass gave.
    logsumexp: of the scores of each query.
    of_out: the gradient of `out`.
    interpret: in Pallas' interpreter.
  """
  # Whole blocks of keys in each chunk; the order of tables is that of the keys.
  held = blocks.block_kv_dkv
  chunks = k.shape[2] // held // blocks_of_chunk(k.shape[2] // held, q.size * q.dtype.itemsize)
  cut = lambda x, axis: jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, -1, *x.shape[axis + 1 :]), axis, 0)
  first = jnp.arange(chunks) * (k.shape[2] // chunks)
  visited = cut(tables.data_next, 2), cut(tables.block_mask, 2)

  # Of the gradient of the scores: what is taken off that of every weight.
  mean = jnp.einsum("bhtv,bhtv->bht", out.astype(jnp.float32), of_out.astype(jnp.float32))
  of_queries = (q, segments.q, logsumexp, of_out, mean)

  def step(of_q: jax.Array, chunk: tuple[Any, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    (data_next, block_mask), first, *of_keys = chunk
    # Inside of a chunk keys are counted from its first one, and so are the queries.
    own = tables._replace(data_next=data_next, block_mask=block_mask, q_sequence=tables.q_sequence - first)
    of_q_here, of_k, of_v = _of_chunk(blocks, own, of_queries, of_keys, interpret)
    return of_q + of_q_here.astype(jnp.float32), (of_k, of_v)

  keys = cut(k, 2), cut(v, 2), cut(segments.kv, 1)
  of_q, of_keys = jax.lax.scan(step, jnp.zeros(q.shape, jnp.float32), (visited, first, *keys))
  of_k, of_v = (jnp.moveaxis(of_x, 0, 2).reshape(x.shape) for of_x, x in zip(of_keys, (k, v), strict=True))
  return of_q.astype(q.dtype), of_k, of_v


def blocks_of_chunk(blocks: int, partial: int) -> int:
  """The most of these blocks whose partial gradients, of so many bytes each, are within bounds. They divide all blocks.

  >>> blocks_of_chunk(64, 2**28), blocks_of_chunk(6, 2**28), blocks_of_chunk(6, 2**31)
  (4, 3, 1)
  """
  most = max(1, min(blocks, PARTIAL_BYTES // partial))
  return max(count for count in range(1, most + 1) if blocks % count == 0)


def _of_chunk(
  blocks: Any, tables: Any, of_queries: tuple[jax.Array, ...], of_keys: list[jax.Array], interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """jax's fused kernel for every row: gradients of all queries, as far as these keys make them, of keys and values."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

  def row(q, q_segments, logsumexp, of_out, mean, k, v, kv_segments):
    return kernels._splash_attention_bwd_dkv(
      q,
      k,
      v,
      kernels.SegmentIds(q=q_segments, kv=kv_segments),
      None,
      logsumexp,
      of_out,
      mean,
      bq=blocks.block_q_dkv,
      bkv=blocks.block_kv_dkv,
      bkv_compute=blocks.block_kv_dkv_compute,
      is_mqa=False,
      mask_info=tables,
      mask_value=kernels.DEFAULT_MASK_VALUE,
      attn_logits_soft_cap=None,
      use_fused_bwd_kernel=True,
      q_layout=blocks.q_layout,
      k_layout=blocks.k_layout,
      v_layout=blocks.v_layout,
      mask_function=is_causal,
      interpret=interpret,
    )

  return jax.vmap(row)(*of_queries, *of_keys)
