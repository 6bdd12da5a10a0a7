"""Dropless mixture of experts: a token's result never depends on the other tokens of the batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.grouped_map import grouped_map
from sao_jax.models.grouped_matmul import choose_implementation, grouped_matmul
from sao_jax.models.linear import feed_forward, linear
from sao_jax.models.router import group_limited_route
from sao_jax.parallel.rules import AxisRules

EXPERT_WEIGHTS = ("gate", "up", "down")


def route(
  x: Float[Array, "*batch D"], router: Float[Array, "D E"], num_active: int, renormalize: bool
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
  """Weights and ids of the k most probable experts of every token.

  Softmax over all experts in fp32; of equal probabilities the lower expert id wins, in the sampler as in the learner.
  """
  logits = linear(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
  weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), num_active)
  if renormalize:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return weights, experts


def expert_feed_forward(
  params: dict[str, Any],
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  experts: Int[Array, "N k"],
  *,
  implementation: str,
) -> Float[Array, "N D"]:
  """Σ_k weight · feed_forward(expert k, x) over the experts that live here, ids 0 ... E - 1; other ids add nothing.

  The N · k pairs (token, expert) are sorted by expert, so that each expert multiplies one contiguous block of rows.
  """
  num_active, num_experts = experts.shape[1], params["gate"].shape[0]
  params = {name: params[name].astype(x.dtype) for name in EXPERT_WEIGHTS}
  ids = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).reshape(-1)
  order, inverse = sort_by_expert(ids, num_experts + 1)
  group_sizes = jnp.sum(ids[:, None] == jnp.arange(num_experts, dtype=ids.dtype), axis=0, dtype=jnp.int32)
  rows = permute(jnp.repeat(x, num_active, axis=0), order, inverse)
  if implementation == "blocked":
    out = grouped_map(feed_forward, params, rows, group_sizes)
  else:
    matmul = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation=implementation)
    out = matmul(jax.nn.silu(matmul(rows, params["gate"])) * matmul(rows, params["up"]), params["down"])
  out = permute(out, inverse, order).reshape(*experts.shape, -1)
  return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)


def sort_by_expert(ids: Int[Array, " M"], num_ids: int) -> tuple[Int[Array, " M"], Int[Array, " M"]]:
  """The stable permutation that sorts `ids` (each below `num_ids`), and its inverse.

  Sorts distinct keys (id, index) in one int32, which a CPU does several times faster than a stable argsort.
  """
  num_pairs = ids.shape[0]
  if num_ids * num_pairs >= 2**31:
    raise ValueError(f"{num_pairs} (token, expert) pairs of {num_ids} experts on one device: use smaller micro-batches")
  index = jnp.arange(num_pairs, dtype=jnp.int32)
  order = jnp.sort(ids.astype(jnp.int32) * num_pairs + index) % num_pairs
  return order, jnp.zeros_like(order).at[order].set(index, unique_indices=True)


@jax.custom_vjp
def permute(rows: Float[Array, "M D"], order: Int[Array, " M"], inverse: Int[Array, " M"]) -> Float[Array, "M D"]:
  """rows[order], where `inverse` undoes `order`. Its gradient is a gather too, where autodiff would scatter."""
  return rows[order]


permute.defvjp(
  lambda rows, order, inverse: (rows[order], inverse),
  lambda inverse, grad: (grad[inverse], None, None),
)


def moe_feed_forward(
  params: dict[str, Any], x: Float[Array, "B T D"], config: ModelConfig, mesh: Mesh | None, rules: AxisRules
) -> Float[Array, "B T D"]:
  """The routed experts of every token plus, where declared, the shared expert."""
  if config.router == "sigmoid":
    weights, experts = group_limited_route(x, params["router"], params["correction_bias"], config)
  else:
    weights, experts = route(x, params["router"], config.num_experts_per_token, config.renormalize_router)
  routed = {name: params[name] for name in EXPERT_WEIGHTS}
  platform = None if mesh is None else mesh.devices.flat[0].platform
  implementation = choose_implementation(config.moe_implementation, platform)
  if mesh is None or mesh.size == 1:
    out = _local_experts(routed, x, weights, experts, implementation)
  else:
    out = _sharded_experts(routed, x, weights, experts, implementation, mesh, rules)
  return out + feed_forward(params["shared"], x) if "shared" in params else out


def _local_experts(
  params: dict[str, Any], x: jax.Array, weights: jax.Array, experts: jax.Array, implementation: str
) -> jax.Array:
  flat = (array.reshape(-1, array.shape[-1]) for array in (x, weights, experts))
  return expert_feed_forward(params, *flat, implementation=implementation).reshape(x.shape)


def _sharded_experts(
  params: dict[str, Any],
  x: jax.Array,
  weights: jax.Array,
  experts: jax.Array,
  implementation: str,
  mesh: Mesh,
  rules: AxisRules,
) -> jax.Array:
  """Every device gathers the tokens of its "expert" group and computes the experts it holds, their width split over
  "tensor"; the partial sums are added and scattered back. Exact and dropless for any routing.

  In general, over the mesh axes that split the experts or their width: those that also split the tokens gather and
  scatter them, over the others the sums are added.
  """
  tokens = rules.spec("batch", "sequence", None)
  inward, outward = rules.spec("expert", None, "mlp"), rules.spec("expert", "mlp", None)
  expert_axes = rules.mesh_axes("expert")
  partial_axes = expert_axes + rules.mesh_axes("mlp")
  gathered = tuple(axis for axis in partial_axes if axis in rules.mesh_axes("batch") + rules.mesh_axes("sequence"))
  summed = tuple(axis for axis in partial_axes if axis not in gathered)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=({"gate": inward, "up": inward, "down": outward}, tokens, tokens, tokens),
    out_specs=tokens,
    check_vma=False,  # a Pallas kernel does not say over which axes its result varies
  )
  def compute(params: dict[str, Any], *arrays: jax.Array) -> jax.Array:
    flat = (array.reshape(-1, array.shape[-1]) for array in arrays)
    x, weights, experts = (jax.lax.all_gather(array, gathered, axis=0, tiled=True) for array in flat)
    experts = experts - jax.lax.axis_index(expert_axes) * params["gate"].shape[0]
    out = expert_feed_forward(params, x, weights, experts, implementation=implementation)
    out = jax.lax.psum_scatter(jax.lax.psum(out, summed), gathered, scatter_dimension=0, tiled=True)
    return out.reshape(arrays[0].shape)

  return compute(params, x, weights, experts)
