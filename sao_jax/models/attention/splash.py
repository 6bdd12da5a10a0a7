"""Attention of packed rows on a TPU: jax's splash attention, a Pallas kernel, with segments.

Blocks above the diagonal are not visited. The kernel finds out from tables with an entry for each block; jax makes them
from every entry of the mask, which takes minutes for 131,072 tokens. Here they are made from the corners of the blocks.

The kernel wants blocks of 128 and more, and heads as wide as the lanes of a TPU, which pad narrower ones in any case.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from sao_jax.models.attention.kind import ATTENTION_OUT
from sao_jax.models.attention.splash_gradient import NARROW_HEADS, WIDE_HEADS, is_causal, splash_gradients

LANES = 128
LARGEST_BLOCK = 1024


def splash_shard(
  q: Float[Array, "B t H h"],
  k: Float[Array, "B T K h"],
  v: Float[Array, "B T K v"],
  q_segments: Int[Array, "B t"],
  kv_segments: Int[Array, "B T"],
  order: np.ndarray,
  shard: jax.Array | int,
  scale: float,
  *,
  interpret: bool = False,
) -> Float[Array, "B t H v"]:
  """Splash attention of one device; see `shards.ShardAttention`. Queries are scaled in their own dtype."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

  # The blocks of these shapes, with the tables of this shard.
  length, width = q.shape[1], v.shape[-1]
  order = np.pad(order, ((0, 0), (0, -length % LANES)), mode="edge")
  made = _tables(_Order(order), k.shape[1] + -k.shape[1] % LANES, max(q.shape[-1], width))
  tables = jax.tree.map(lambda of_shards: jnp.asarray(of_shards)[shard], made.tables)

  # Whole blocks and lanes. The last query stands in for those that follow; keys that follow are after all queries.
  q, k, v = (_fill(jnp.moveaxis(x, 1, 2), (2, 3)) for x in (q * scale, k, v))  # [B, heads, tokens, width]
  segments = kernels.SegmentIds(q=_fill(q_segments, (1,), "edge"), kv=_fill(kv_segments, (1,), "edge"))
  out = _attend(made.blocks, interpret, tables, q.astype(k.dtype), k, v, segments)
  return jnp.moveaxis(out[:, :, :length, :width], 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
  blocks: Any, interpret: bool, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any
) -> jax.Array:
  """The forward kernel, for every row of [B, heads, tokens, width]."""
  return _forward(blocks, interpret, tables, q, k, v, segments, save_residuals=False)


def _attend_forward(
  blocks: Any, interpret: bool, tables: Tables, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any
) -> tuple[jax.Array, tuple[Any, ...]]:
  """The same, and what the backward pass reads. Named out here, where a policy of rematerialisation sees it."""
  out, (logsumexp,) = _forward(blocks, interpret, tables, q, k, v, segments, save_residuals=True)
  out, logsumexp = (checkpoint_name(x, ATTENTION_OUT) for x in (out, logsumexp))
  return out, (tables, q, k, v, segments, out, logsumexp)


def _attend_backward(blocks: Any, interpret: bool, kept: tuple[Any, ...], of_out: jax.Array) -> tuple[Any, ...]:
  tables, q, k, v, segments, out, logsumexp = kept
  gradients = splash_gradients(blocks, tables.backward, q, k, v, segments, out, logsumexp, of_out, interpret=interpret)
  return None, *gradients, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward(
  blocks: Any,
  interpret: bool,
  tables: Tables,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segments: Any,
  *,
  save_residuals: bool,
) -> Any:
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

  # Causality inside of a block is a function of indices, not an array.
  kernel = kernels.SplashAttentionKernel(
    tables.forward,
    None,
    None,
    block_sizes=blocks,
    is_mqa=False,
    save_residuals=save_residuals,
    mask_value=kernels.DEFAULT_MASK_VALUE,
    attn_logits_soft_cap=None,
    residual_checkpoint_name=None,
    mask_function=is_causal,
    interpret=interpret,
  )
  return jax.vmap(kernel)(q, k, v, segments)


def _fill(x: Shaped[Array, "..."], axes: tuple[int, ...], mode: str = "constant") -> Shaped[Array, "..."]:
  """`x` with these axes filled up to multiples of `LANES`."""
  pads = [(0, -size % LANES if axis in axes else 0) for axis, size in enumerate(x.shape)]
  return jnp.pad(x, pads, mode=mode) if any(pad for _, pad in pads) else x


class _Order:
  """The indices of the queries of all shards, [shards, t], as a key of a cache."""

  def __init__(self, array: np.ndarray):
    self.array = array

  def __hash__(self) -> int:
    return hash(self.array.tobytes())

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Order) and np.array_equal(self.array, other.array)


class Tables(NamedTuple):
  """jax's tables of the forward and of the backward kernel: the blocks to visit, and which one to fetch next."""

  forward: Any
  backward: Any


class _Made(NamedTuple):
  """Blocks, and tables whose arrays have a leading axis: the shards."""

  blocks: Any
  tables: Tables


@functools.lru_cache(maxsize=16)
def _tables(order: _Order, kv_length: int, width: int) -> _Made:
  """The blocks and tables of these queries and keys. Made once per shape."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

  # Blocks divide the queries of a shard (and its two chunks, if they can), and the keys.
  length = order.array.shape[1]
  q_block = _block(length // 2 if length % (2 * LANES) == 0 else length, LARGEST_BLOCK)
  kv_block = _block(kv_length, LARGEST_BLOCK)
  of_gradients = NARROW_HEADS if width <= LANES else WIDE_HEADS
  kv_held = _block(kv_length, of_gradients.held)

  # One size for the forward pass, one for the gradients.
  blocks = kernels.BlockSizes(
    block_q=q_block,
    block_kv=kv_block,
    block_kv_compute=kv_block,
    block_q_dkv=min(q_block, of_gradients.queries),
    block_kv_dkv=kv_held,
    block_kv_dkv_compute=min(kv_held, of_gradients.keys),
    use_fused_bwd_kernel=True,
  )
  # Those of the gradients are not shrunk to what is visited: a partial gradient of queries has a place for every block.
  process_backward = functools.partial(mask_info.process_mask_dkv, shrink_grid=False)
  forward = _tables_of(order.array, kv_length, q_block, kv_block, mask_info.process_mask)
  backward = _tables_of(order.array, kv_length, blocks.block_q_dkv, kv_held, process_backward)
  return _Made(blocks, Tables(forward, backward))


def _block(length: int, most: int) -> int:
  """The largest power of two up to `most` that divides `length`, itself a multiple of the lanes."""
  return min(most, length & -length)


def _tables_of(order: np.ndarray, kv_length: int, q_block: int, kv_block: int, process: Any) -> Any:
  """The tables of a kernel for all shards, [shards, ...]: the blocks to visit, and which one to fetch next.

  Args:
    order: [shards, t], the queries' indices.
    kv_length: T.
    q_block: queries of a block.
    kv_block: keys of a block.
    process: jax's maker of tables, forwards or for the gradients.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  # A block is read in part or in full if that holds for its earliest and latest query and its first and last key: the
  # mask of these corners, in blocks of two by two, has the tables of the whole mask.
  shards = order.shape[0]
  in_blocks = order.reshape(-1, q_block)
  queries = np.stack([in_blocks.min(axis=1), in_blocks.max(axis=1)], axis=1).reshape(-1)
  first = np.arange(0, kv_length, kv_block)
  keys = np.stack([first, first + kv_block - 1], axis=1).reshape(-1)
  corners = masks.MultiHeadMask([masks.NumpyMask(queries[:, None] >= keys)])
  info, _ = process(corners, (2, 2), head_shards=1, q_seq_shards=shards)

  # What the mask is inside of a block is computed by the kernel.
  by_shard = lambda x: np.asarray(x).reshape(shards, 1, -1, x.shape[-1])
  return info._replace(
    data_next=by_shard(info.data_next),
    block_mask=by_shard(info.block_mask),
    mask_next=None,
    partial_mask_blocks=None,
    q_sequence=order,
  )
