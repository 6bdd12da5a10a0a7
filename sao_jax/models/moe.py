"""Dropless mixture of experts: a token's result never depends on the other tokens of the batch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.grouped_matmul import choose_implementation, grouped_map, grouped_matmul
from sao_jax.models.linear import feed_forward
from sao_jax.models.router import route
from sao_jax.parallel.layout import Layout

EXPERT_WEIGHTS = ("gate", "up", "down")


class Routed(NamedTuple):
  """Experts and figures of every token of an MoE layer; layers are stacked in front. See `router.Routing`.

  Attributes:
    experts: the k experts of every token.
    entropy: the router's entropy, in nats.
    agreeing: the number of them that the router itself prefers.
    computed: the number of them that some device has computed: k, or the layer is not dropless.
  """

  experts: Int[Array, "*layers B T k"]
  entropy: Float[Array, "*layers B T"]
  agreeing: Int[Array, "*layers B T"]
  computed: Int[Array, "*layers B T"]


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

  # Pairs of other devices sort behind the last group, where nothing is computed.
  ids = jnp.where(lives_here(experts, num_experts), experts, num_experts).reshape(-1)
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


def lives_here(experts: Int[Array, "*pairs"], num_experts: int) -> Bool[Array, "*pairs"]:
  """True for the ids of the `num_experts` experts of this device."""
  return (experts >= 0) & (experts < num_experts)


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
  params: dict[str, Any],
  x: Float[Array, "B T D"],
  config: ModelConfig,
  layout: Layout,
  replayed: Int[Array, "B T k"] | None = None,
) -> tuple[Float[Array, "B T D"], Routed]:
  """The routed experts of every token plus, where declared, the shared expert; and how the tokens were routed.

  `replayed` are experts to use instead of those that the router prefers, -1 where there are none.
  """
  routing = route(params, x, config, replayed, layout)
  routed = {name: params[name] for name in EXPERT_WEIGHTS}
  implementation = choose_implementation(config.moe_implementation, layout.platform)
  if layout.is_sharded:
    out, computed = _sharded_experts(routed, x, routing.weights, routing.experts, implementation, layout)
  else:
    out, computed = _local_experts(routed, x, routing.weights, routing.experts, implementation)
  out = out + feed_forward(params["shared"], x, layout) if "shared" in params else out
  return out, Routed(routing.experts, routing.entropy, routing.agreeing, computed)


def _local_experts(
  params: dict[str, Any], x: jax.Array, weights: jax.Array, experts: jax.Array, implementation: str
) -> tuple[jax.Array, jax.Array]:
  """The sum over the experts that live here, and how many of them there are, for every token."""
  flat = (array.reshape(-1, array.shape[-1]) for array in (x, weights, experts))
  out = expert_feed_forward(params, *flat, implementation=implementation).reshape(x.shape)
  return out, jnp.sum(lives_here(experts, params["gate"].shape[0]), axis=-1, dtype=jnp.int32)


def _sharded_experts(
  params: dict[str, Any],
  x: jax.Array,
  weights: jax.Array,
  experts: jax.Array,
  implementation: str,
  layout: Layout,
) -> tuple[jax.Array, jax.Array]:
  """`_local_experts` over a mesh, exact and dropless for any routing.

  Every device gathers the tokens of its "expert" group and computes the experts it holds, their width split over
  "tensor"; the partial sums are added and scattered back. With other rules: of the mesh axes that split the experts or
  their width, those that also split the tokens gather and scatter them, and the sums are added over the others.
  """
  rules = layout.rules
  tokens = layout.spec("batch", "sequence", None)
  inward, outward = layout.spec("expert", None, "mlp"), layout.spec("expert", "mlp", None)
  expert_axes = rules.mesh_axes("expert")
  partial_axes = expert_axes + rules.mesh_axes("mlp")
  gathered = tuple(axis for axis in partial_axes if axis in rules.mesh_axes("batch") + rules.mesh_axes("sequence"))
  summed = tuple(axis for axis in partial_axes if axis not in gathered)
  copies = layout.shards("mlp")  # of every expert, in slices of its width

  @functools.partial(
    jax.shard_map,
    mesh=layout.mesh,
    in_specs=({"gate": inward, "up": inward, "down": outward}, tokens, tokens, tokens),
    out_specs=(tokens, layout.spec("batch", "sequence")),
    check_vma=False,  # a Pallas kernel does not say over which axes its result varies
  )
  def compute(params: dict[str, Any], *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    gather = lambda array: jax.lax.all_gather(array.reshape(-1, array.shape[-1]), gathered, axis=0, tiled=True)
    x, weights, experts = map(gather, arrays)
    experts = experts - jax.lax.axis_index(expert_axes) * params["gate"].shape[0]

    def add_up(part: jax.Array) -> jax.Array:
      total = jax.lax.psum_scatter(jax.lax.psum(part, summed), gathered, scatter_dimension=0, tiled=True)
      return total.reshape(*arrays[0].shape[:2], *part.shape[1:])

    out, computed = _local_experts(params, x, weights, experts, implementation)
    return add_up(out), add_up(computed) // copies

  return compute(params, x, weights, experts)
