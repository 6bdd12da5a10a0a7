"""Even load without an auxiliary loss: the sigmoid router's correction bias follows the load (arXiv 2408.15664).

The bias only says which experts are chosen, never with which weight, so that no gradient competes with the task's. It
therefore trains in no other way: for the optimisers it is frozen.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from sao_jax.config import ModelConfig
from sao_jax.models.transformer import num_moe_layers
from sao_jax.parallel.params import Params


def router_bias_paths(config: ModelConfig) -> frozenset[str]:
  """The full names of the correction biases, of which there may be none."""
  has_bias = config.router == "sigmoid" and num_moe_layers(config) > 0
  return frozenset({"moe_layers/moe/correction_bias"}) if has_bias else frozenset()


def update_router_bias(params: Params, load: Float[Array, "L E"], rate: float) -> Params:
  """The parameters with every bias changed by rate · sign(even share - load of its expert)."""
  layers = params["moe_layers"]
  even = jnp.mean(load, axis=-1, keepdims=True)
  bias = layers["moe"]["correction_bias"]
  changed = bias + (rate * jnp.sign(even - load)).astype(bias.dtype)
  return params | {"moe_layers": layers | {"moe": layers["moe"] | {"correction_bias": changed}}}
