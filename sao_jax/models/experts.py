"""The experts of one device: pairs (token, expert) sorted by expert, and a gated feed-forward of every group."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.models.grouped_matmul import grouped_map, grouped_matmul
from sao_jax.models.linear import feed_forward

EXPERT_WEIGHTS = ("gate", "up", "down")
ExpertWeights = dict[str, Any]  # of a layer: gate and up [E, D, F], down [E, F, D]; of a stack of layers [L, E, ...]


def expert_feed_forward(
  params: ExpertWeights,
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  experts: Int[Array, "N k"],
  *,
  implementation: str,
  layer: Int[Array, ""] | None = None,
) -> Float[Array, "N D"]:
  """Σ_k weight · feed_forward(expert k, x) over the experts that live here, ids 0 ... E - 1; other ids add nothing.

  The N · k pairs (token, expert) are sorted by expert, so that each expert multiplies one contiguous block of rows.
  With `layer`, `params` are those of all layers, and this one's are read where they stand; that has no gradient.
  """
  num_active, num_experts = experts.shape[1], count_experts(params)

  # Pairs of other devices sort behind the last group, where nothing is computed.
  ids = local_ids(experts, num_experts)
  order, inverse = sort_by_expert(ids, num_experts + 1)

  rows = permute(jnp.repeat(x, num_active, axis=0), order, inverse)
  out = feed_groups(params, rows, count_groups(ids, num_experts), implementation=implementation, layer=layer)
  out = permute(out, inverse, order).reshape(*experts.shape, -1)
  return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)


def feed_groups(
  params: ExpertWeights,
  rows: Float[Array, "M D"],
  group_sizes: Int[Array, " E"],
  *,
  implementation: str,
  layer: Int[Array, ""] | None = None,
) -> Float[Array, "M D"]:
  """feed_forward(expert e, rows) for the rows of group e; 0 for rows behind the last group."""
  params = {name: params[name].astype(rows.dtype) for name in EXPERT_WEIGHTS}
  first = None
  if layer is not None:
    # The experts of all layers are one stack of groups, of which a layer's are a contiguous range: no copy is made.
    params = {name: weight.reshape(-1, *weight.shape[2:]) for name, weight in params.items()}
    first = layer * group_sizes.shape[0]

  if implementation == "blocked":
    return grouped_map(feed_forward, params, rows, group_sizes, first=first)
  matmul = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation=implementation, first=first)
  return matmul(jax.nn.silu(matmul(rows, params["gate"])) * matmul(rows, params["up"]), params["down"])


def count_experts(params: ExpertWeights) -> int:
  """The number of experts of a layer that these weights hold."""
  return params["gate"].shape[-3]


def lives_here(experts: Int[Array, "*pairs"], num_experts: int) -> Bool[Array, "*pairs"]:
  """True for the ids of the `num_experts` experts of this device."""
  return (experts >= 0) & (experts < num_experts)


def local_ids(experts: Int[Array, "N k"], num_experts: int) -> Int[Array, " M"]:
  """The expert of every pair, flat; `num_experts` for those of other devices."""
  return jnp.where(lives_here(experts, num_experts), experts, num_experts).reshape(-1)


def count_groups(ids: Int[Array, " M"], num_experts: int) -> Int[Array, " E"]:
  """The number of pairs of every expert that lives here."""
  return jnp.sum(ids[:, None] == jnp.arange(num_experts, dtype=ids.dtype), axis=0, dtype=jnp.int32)


def sort_by_expert(ids: Int[Array, " M"], num_ids: int) -> tuple[Int[Array, " M"], Int[Array, " M"]]:
  """The stable permutation that sorts `ids` (each below `num_ids`), and its inverse.

  Sorts distinct keys (id, index) in one int32, which a CPU does several times faster than a stable sort of pairs.
  Where the keys do not fit, the pairs are sorted.
  """
  num_pairs = ids.shape[0]
  ids, index = ids.astype(jnp.int32), jnp.arange(num_pairs, dtype=jnp.int32)
  if num_ids * num_pairs < 2**31:
    order = jnp.sort(ids * num_pairs + index) % num_pairs
  else:
    _, order = jax.lax.sort((ids, index), num_keys=1, is_stable=True)
  return order, jnp.zeros_like(order).at[order].set(index, unique_indices=True)


@jax.custom_vjp
def permute(rows: Float[Array, "M D"], order: Int[Array, " M"], inverse: Int[Array, " M"]) -> Float[Array, "M D"]:
  """rows[order], where `inverse` undoes `order`. Its gradient is a gather too, where autodiff would scatter."""
  return rows[order]


permute.defvjp(
  lambda rows, order, inverse: (rows[order], inverse),
  lambda inverse, grad: (grad[inverse], None, None),
)
