"""Experts of one device among several: only the pairs (token, expert) that live here are laid out, a buffer at a time.

Of the pairs of all devices, one in so many lives here if the load is even. A buffer holds somewhat more rows than that;
what does not fit waits for the next round of a loop, so that any routing is computed exactly, in bounded memory. Rows
are gathered in both directions, forward and backward, never scattered.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.models.experts import (
  ExpertWeights,
  count_experts,
  count_groups,
  feed_groups,
  lives_here,
  local_ids,
  sort_by_expert,
)

BUFFER_FACTOR = 1.5  # rows of a buffer, as a multiple of the pairs of this device under an even load
FEW_PAIRS = 2048  # so many pairs are laid out all at once, as those of a decode step: their memory does not matter


class Rows(NamedTuple):
  """The rows of a buffer.

  Attributes:
    pairs: the pair of every row.
    used: False for rows behind the last pair.
    group_sizes: the number of rows of every expert.
    places: the row of every pair, -1 for a pair that is not in the buffer.
  """

  pairs: Int[Array, " M"]
  used: Bool[Array, " M"]
  group_sizes: Int[Array, " E"]
  places: Int[Array, "k N"]


def buffer_rows(num_pairs: int, shards: int) -> int:
  """The rows of a buffer: at most `BUFFER_FACTOR` times the even share of a device, in whole tiles; or all pairs."""
  if shards == 1 or num_pairs <= FEW_PAIRS:
    return num_pairs
  rows = int(BUFFER_FACTOR * num_pairs / shards)
  tile = 512 if rows >= 512 else 8
  return min(max(rows // tile * tile, tile), num_pairs)


def buffered_experts(
  params: ExpertWeights,
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  experts: Int[Array, "N k"],
  *,
  rows: int,
  implementation: str,
  layer: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "N D"], Int[Array, " N"]]:
  """The result of `expert_feed_forward`, in buffers of `rows` rows; and how many pairs of every token were computed.

  Its gradient is `buffered_gradient`.
  """
  num_experts = count_experts(params)
  order, places, ends = _sort(experts, num_experts, rows)

  def add_buffer(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    start, out = carry
    own = _lay_out(order, places, ends, start, rows)
    return start + rows, out + _compute(params, x, weights, own, implementation, layer)

  unfinished = lambda carry: carry[0] < ends[-1]
  covered, out = jax.lax.while_loop(unfinished, add_buffer, (jnp.int32(0), jnp.zeros_like(x)))

  # Counted by what the loop has reached, not by what it should have.
  whole = jnp.append(ends <= covered, False)[jnp.where(lives_here(experts, num_experts), experts, num_experts)]
  return out, jnp.sum(whole, axis=1, dtype=jnp.int32)


def buffered_gradient(
  params: ExpertWeights,
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  experts: Int[Array, "N k"],
  out_grad: Float[Array, "N D"],
  so_far: ExpertWeights | None = None,
  *,
  rows: int,
  implementation: str,
) -> tuple[ExpertWeights, Float[Array, "N D"], Float[Array, "N k"]]:
  """The gradients of `buffered_experts`: of the parameters, added in fp32 to those `so_far`, of `x` and of `weights`.

  The same loop; what a buffer computes inside is computed again, nothing was stored.
  """
  order, places, ends = _sort(experts, count_experts(params), rows)

  def add_buffer(carry: tuple[jax.Array, tuple]) -> tuple[jax.Array, tuple]:
    start, grads = carry
    own = _lay_out(order, places, ends, start, rows)
    _, vjp = jax.vjp(lambda *args: _compute(*args, own, implementation), params, x, weights)
    return start + rows, jax.tree.map(lambda total, part: total + part.astype(total.dtype), grads, vjp(out_grad))

  if so_far is None:
    so_far = {name: jnp.zeros(weight.shape, jnp.float32) for name, weight in params.items()}
  zeros = so_far, jnp.zeros_like(x), jnp.zeros_like(weights)
  return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], add_buffer, (jnp.int32(0), zeros))[1]


def _sort(experts: jax.Array, num_experts: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sorts the pairs by expert: their order, filled up to whole buffers, every pair's place, every expert's end."""
  ids = local_ids(experts, num_experts)
  order, places = sort_by_expert(ids, num_experts + 1)
  ends = jnp.cumsum(count_groups(ids, num_experts))
  return jnp.pad(order, (0, -order.shape[0] % rows)), places.reshape(experts.shape).T, ends


def _lay_out(order: jax.Array, places: jax.Array, ends: jax.Array, start: jax.Array, rows: int) -> Rows:
  """The pairs from `start` on, as many as the buffer has rows."""
  used = start + jnp.arange(rows, dtype=jnp.int32) < ends[-1]
  reached = jnp.clip(ends - start, 0, rows)
  inside = (places >= start) & (places < jnp.minimum(start + rows, ends[-1]))
  return Rows(
    pairs=jax.lax.dynamic_slice_in_dim(order, start, rows),
    used=used,
    group_sizes=jnp.diff(reached, prepend=jnp.int32(0)),
    places=jnp.where(inside, places - start, -1),
  )


def _compute(
  params: ExpertWeights,
  x: jax.Array,
  weights: jax.Array,
  own: Rows,
  implementation: str,
  layer: jax.Array | None = None,
) -> jax.Array:
  """The sum that the pairs of one buffer add to the result of every token."""
  num_active = weights.shape[1]
  out = feed_groups(params, spread(x, own, num_active), own.group_sizes, implementation=implementation, layer=layer)
  chosen = (own.pairs % num_active)[:, None] == jnp.arange(num_active, dtype=jnp.int32)
  weight = jnp.sum(jnp.where(chosen, spread(weights, own, num_active), 0), axis=1, keepdims=True)
  return collect(out * weight.astype(out.dtype), own, num_active)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x: Float[Array, "N D"], own: Rows, num_active: int) -> Float[Array, "M D"]:
  """The token of every row; 0 in unused rows. Its transpose is `collect`."""
  return jnp.where(own.used[:, None], x[own.pairs // num_active], 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(rows: Float[Array, "M D"], own: Rows, num_active: int) -> Float[Array, "N D"]:
  """The sum of the rows of every token, of which there are at most `num_active`; in fp32. Its transpose is `spread`."""

  def add_next(number: jax.Array, total: jax.Array) -> jax.Array:
    place = jax.lax.dynamic_index_in_dim(own.places, number, keepdims=False)
    return total + jnp.where((place >= 0)[:, None], rows[jnp.maximum(place, 0)], 0)

  zeros = jnp.zeros((own.places.shape[1], rows.shape[1]), jnp.float32)
  return jax.lax.fori_loop(0, num_active, add_next, zeros).astype(rows.dtype)


# Each is the other's gradient.
spread.defvjp(
  lambda x, own, num_active: (spread(x, own, num_active), own),
  lambda num_active, own, grad: (collect(grad, own, num_active), None),
)
collect.defvjp(
  lambda rows, own, num_active: (collect(rows, own, num_active), own),
  lambda num_active, own, grad: (spread(grad, own, num_active), None),
)
