"""Dropless mixture of experts: a token's result never depends on the other tokens of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.batched_experts import batched_experts
from sao_jax.models.expert_shards import apply_sharded, sharded_experts
from sao_jax.models.experts import EXPERT_WEIGHTS, ExpertWeights, count_experts, expert_feed_forward, lives_here
from sao_jax.models.grouped_matmul import choose_implementation
from sao_jax.models.linear import feed_forward
from sao_jax.models.router import Routing, route
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.params import Params


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


@jax.named_scope("moe")
def moe_feed_forward(
  params: dict[str, Any],
  x: Float[Array, "B T D"],
  config: ModelConfig,
  layout: Layout,
  replayed: Int[Array, "B T k"] | None = None,
  layer: Int[Array, ""] | None = None,
  *,
  batched: bool = False,
) -> tuple[Float[Array, "B T D"], Routed]:
  """The routed experts of every token plus, where declared, the shared expert; and how the tokens were routed.

  `replayed` are experts to use instead of those that the router prefers, -1 where there are none. With `layer`, the
  experts' weights are those of all layers, and this one's are read where they stand; they then have no gradient. Nor
  have they with `batched`, the fastest for few tokens on one CPU device: see `batched_experts`.
  """
  routing = route(params, x, config, replayed, layout)
  implementation = choose_implementation(config.moe_implementation, layout.platform)
  implementation = "batched" if batched and implementation == "blocked" else implementation
  out, computed = _routed_experts(params, x, routing, implementation, layout, layer)
  out = out + feed_forward(params["shared"], x, layout) if "shared" in params else out
  return out, Routed(routing.experts, routing.entropy, routing.agreeing, computed)


@jax.named_scope("experts")
def _routed_experts(
  params: ExpertWeights, x: jax.Array, routing: Routing, implementation: str, layout: Layout, layer: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """The sum over the experts of every token, and how many of them were computed."""
  weights, experts = routing.weights, routing.experts
  if layout.is_sharded and layer is None:
    return sharded_experts(layout, implementation, {name: params[name] for name in EXPERT_WEIGHTS}, x, weights, experts)
  if layout.is_sharded:
    return apply_sharded(layout, implementation, params, x, weights, experts, layer)

  flat = (array.reshape(-1, array.shape[-1]) for array in (x, weights, experts))
  if implementation == "batched":
    out = batched_experts({name: params[name] for name in EXPERT_WEIGHTS}, *flat)
  else:
    out = expert_feed_forward(params, *flat, implementation=implementation, layer=layer)
  out = out.reshape(x.shape)
  return out, jnp.sum(lives_here(experts, count_experts(params)), axis=-1, dtype=jnp.int32)


def set_experts_apart(layers: Params, dtype: Any, layout: Layout) -> tuple[Params, ExpertWeights]:
  """Splits stacked layers into what each is given, and the experts, which they then read where they stand.

  The latter are {} where a layer's weights cannot be read as they are stored: in another dtype, or in parts.
  """
  moe = layers["moe"]
  if layout.shards("expert_embed") > 1 or any(moe[name].dtype != dtype for name in EXPERT_WEIGHTS):
    return layers, {}
  others = {name: leaf for name, leaf in moe.items() if name not in EXPERT_WEIGHTS}
  return layers | {"moe": others}, {name: moe[name] for name in EXPERT_WEIGHTS}
