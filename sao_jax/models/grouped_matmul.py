"""Grouped matrix products: contiguous groups of rows, each times its own matrix; three implementations.

The blocked one is `grouped_map`: it applies any function of (parameters of a group, rows), a tile of rows at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.parallel.layout import ONE_DEVICE

Params = Any
RowFunction = Callable[[Params, jax.Array], jax.Array]

MEGABLOX_TILE = (512, 1024, 1024)  # rows, contracted width, output width; clipped to the operands


def choose_implementation(name: str, platform: str | None = None) -> str:
  """The implementation to use; "auto" is megablox on a TPU and blocked elsewhere, by default on the default device."""
  if name == "auto":
    return "megablox" if (platform or ONE_DEVICE.platform) == "tpu" else "blocked"
  return name


def grouped_matmul(
  lhs: Float[Array, "M D"],
  rhs: Float[Array, "matrices D F"],
  group_sizes: Int[Array, " E"],
  implementation: str = "auto",
  first: Int[Array, ""] | None = None,
) -> Float[Array, "M F"]:
  """out[m] = lhs[m] · rhs[e] for the rows m of group e; 0 (and no gradient) for rows behind the last group.

  Args:
    lhs: rows, sorted by group.
    rhs: one matrix per group; more of them with `first`.
    group_sizes: int32 number of rows of every group, empty groups allowed; their sum is at most M.
    implementation: auto | blocked | megablox (TPU) | ragged_dot, see `choose_implementation`.
    first: the matrix of the first group, the others follow it. They are read where they stand (ragged_dot: in a copy).
      None: the first one. Otherwise there is no gradient.
  """
  implementation = choose_implementation(implementation)
  if implementation == "blocked":
    return grouped_map(_matmul, rhs, lhs, group_sizes, first=first)
  # The other two leave rows behind the last group undefined, in the result and in the gradient.
  inside = jnp.arange(lhs.shape[0], dtype=jnp.int32)[:, None] < jnp.sum(group_sizes)
  lhs = jnp.where(inside, lhs, 0)
  if implementation == "megablox":
    out = megablox_matmul(lhs, rhs, group_sizes, first)
  else:
    own = rhs if first is None else jax.lax.dynamic_slice_in_dim(rhs, first, group_sizes.shape[0], 0)
    out = jax.lax.ragged_dot(lhs, own, group_sizes)
  return jnp.where(inside, out, 0)


def _matmul(matrix: jax.Array, rows: jax.Array) -> jax.Array:
  return jnp.dot(rows, matrix)


def megablox_matmul(
  lhs: Float[Array, "M D"],
  rhs: Float[Array, "matrices D F"],
  group_sizes: Int[Array, " E"],
  first: Int[Array, ""] | None = None,
  interpret: bool = False,
) -> Float[Array, "M F"]:
  """The Pallas kernel of jax, with rows padded to whole tiles. `interpret` runs it without a TPU, slowly."""
  from jax.experimental.pallas.ops.tpu.megablox import gmm  # pulls in Pallas, which only TPU runs need

  num_rows = lhs.shape[0]
  row_tile = min(MEGABLOX_TILE[0], -(-num_rows // 128) * 128)
  lhs = jnp.pad(lhs, ((0, -num_rows % row_tile), (0, 0)))
  tiling = (row_tile, min(MEGABLOX_TILE[1], rhs.shape[1]), min(MEGABLOX_TILE[2], rhs.shape[2]))

  # The kernel's group g reads the matrix g - offset: it is meant for matrices that begin with a later group.
  offset = None if first is None else -first
  return gmm(lhs, rhs, group_sizes, lhs.dtype, tiling, offset, None, False, interpret)[:num_rows]


def grouped_map(
  fn: RowFunction,
  params: Params,
  rows: Float[Array, "M D"],
  group_sizes: Int[Array, " E"],
  first: Int[Array, ""] | None = None,
) -> Float[Array, "M F"]:
  """out[m] = fn(params[e], rows[m]) for the rows m of group e; 0 for rows behind the last group.

  Args:
    fn: maps (parameters of one group, rows [t, D]) to [t, F], every row for itself. Static: hashable.
    params: a tree of arrays with a leading axis E. Their gradients are accumulated in fp32.
    rows: rows, sorted by group.
    group_sizes: number of rows of every group; their sum is at most M.
    first: the parameters of the first group, the others follow them, and there is no gradient. None: the first ones.
  """
  tile = _tile_rows(rows.shape[0], group_sizes.shape[0])
  if first is not None:
    return _forward(fn, tile, params, rows, group_sizes, first)[0]
  return _grouped_map(fn, tile, params, rows, group_sizes)


def _tile_rows(num_rows: int, num_groups: int) -> int:
  """Rows per tile: about an average group, so that small batches waste little; 64 measured best for large ones."""
  return min(64, max(8, 1 << max(num_rows // num_groups, 1).bit_length() - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_map(fn: RowFunction, tile: int, params: Params, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
  return _forward(fn, tile, params, rows, group_sizes)[0]


def _forward(
  fn: RowFunction,
  tile: int,
  params: Params,
  rows: jax.Array,
  group_sizes: jax.Array,
  first: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
  padded = _pad(rows, tile)  # the last tile may reach behind the last row
  ends = jnp.cumsum(group_sizes)
  result = jax.eval_shape(fn, _select(params, 0), padded[:tile])

  def group(index: jax.Array, out: jax.Array) -> jax.Array:
    own = _select(params, index if first is None else first + index)
    start = ends[index] - group_sizes[index]

    def compute_tile(i: jax.Array, out: jax.Array) -> jax.Array:
      # A tile that reaches into the next groups writes rows there that those groups write again, later and right.
      row = start + i * tile
      return _write(out, fn(own, _read(padded, row, tile)), row)

    return jax.lax.fori_loop(0, _num_tiles(group_sizes[index], tile), compute_tile, out)

  out = jnp.zeros((padded.shape[0], *result.shape[1:]), result.dtype)
  out = jax.lax.fori_loop(0, group_sizes.shape[0], group, out)[: rows.shape[0]]
  return _keep(out, ends[-1]), (params, rows, group_sizes)


def _backward(fn: RowFunction, tile: int, residuals: Any, out_grad: jax.Array) -> tuple[Any, jax.Array, None]:
  """The same walk with the derivative of `fn`; what `fn` computes inside is computed again, nothing was stored."""
  # Gradients of parameters add up over the tiles of a group, those of rows are written tile by tile.
  params, rows, group_sizes = residuals
  padded, padded_grad = _pad(rows, tile), _pad(out_grad, tile)
  ends = jnp.cumsum(group_sizes)

  def group(index: jax.Array, grads: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
    params_grad, rows_grad = grads
    own = _select(params, index)
    start = ends[index] - group_sizes[index]

    def differentiate_tile(i: jax.Array, grads: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
      own_grad, rows_grad = grads
      row = start + i * tile
      # Rows behind the group's end belong to others: no gradient of theirs may reach these parameters.
      tile_grad = _keep(_read(padded_grad, row, tile), ends[index] - row)
      _, vjp = jax.vjp(fn, own, _read(padded, row, tile))
      own_tile_grad, rows_tile_grad = vjp(tile_grad)
      return jax.tree.map(jnp.add, own_grad, own_tile_grad), _write(rows_grad, rows_tile_grad, row)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), own)
    num_tiles = _num_tiles(group_sizes[index], tile)
    own_grad, rows_grad = jax.lax.fori_loop(0, num_tiles, differentiate_tile, (zeros, rows_grad))
    write = lambda all_groups, one: jax.lax.dynamic_update_index_in_dim(all_groups, one, index, 0)
    return jax.tree.map(write, params_grad, own_grad), rows_grad

  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), jnp.zeros_like(padded)
  params_grad, rows_grad = jax.lax.fori_loop(0, group_sizes.shape[0], group, zeros)
  params_grad = jax.tree.map(lambda grad, p: grad.astype(p.dtype), params_grad, params)
  return params_grad, _keep(rows_grad[: rows.shape[0]], ends[-1]), None


_grouped_map.defvjp(_forward, _backward)


def _num_tiles(group_size: jax.Array, tile: int) -> jax.Array:
  return (group_size + tile - 1) // tile


def _select(params: Params, index: jax.Array | int) -> Params:
  return jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, index, 0, keepdims=False), params)


def _pad(rows: jax.Array, tile: int) -> jax.Array:
  return jnp.pad(rows, ((0, tile), (0, 0)))


def _read(rows: jax.Array, start: jax.Array, tile: int) -> jax.Array:
  return jax.lax.dynamic_slice_in_dim(rows, start, tile, 0)


def _write(rows: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(rows, update, start, 0)


def _keep(rows: jax.Array, count: jax.Array) -> jax.Array:
  """The first `count` rows; zeros behind them."""
  return jnp.where(jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None] < count, rows, 0)
