"""What the train step reports about the policy's routers; every figure is over all tokens of the global batch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from sao_jax.types import RouterStatistics


def router_metrics(router: RouterStatistics) -> dict[str, Float[Array, ""]]:
  """Entropy, load and replay of the routers; NaN where there is nothing to average over.

  "router_entropy": mean over tokens and layers, in nats, at most log E. "router_load_max": tokens of the busiest expert
  of all layers, as a multiple of an even share; 1 is even, E / k the worst. "router_idle_experts": share of experts
  that no token used. "router_dropped": choices that no expert computed, which is 0 in a dropless layer.
  "router_replayed": share of choices that came from the sampler; "router_agreement": share of those that this router
  makes too.
  """
  load = jnp.sum(router.load, axis=0)  # [L, E]
  num_choices, num_replayed = jnp.sum(load), jnp.sum(router.replayed)
  even = jnp.mean(load, axis=-1, keepdims=True)
  return {
    "router_entropy": jnp.sum(router.entropy) / (jnp.sum(router.tokens) * load.shape[0]),
    "router_load_max": jnp.max(load / even),
    "router_idle_experts": jnp.where(num_choices > 0.0, jnp.mean(load == 0.0, dtype=jnp.float32), jnp.nan),
    "router_dropped": jnp.sum(router.dropped),
    "router_replayed": num_replayed / num_choices,
    "router_agreement": jnp.sum(router.agreeing) / num_replayed,
  }
