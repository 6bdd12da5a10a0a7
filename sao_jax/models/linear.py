"""Matrix products of activations [..., D] with weights, and the gated feed-forward made of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
  x: Float[Array, "*batch D"], weight: Float[Array, "D ..."], *, dtype: Any = None, precision: Any = None
) -> Array:
  """x · weight over the last axis of `x` and the first of `weight`, which is cast to the dtype of `x`.

  `dtype` is that of the sums and the result (None: of `x`), `precision` as in `jax.lax.dot`.

  On a CPU the product is a plain 2-D one: the weight gradient of a rank-3 product is several times slower there.
  Elsewhere axes stay apart, so that each keeps its sharding.
  """
  weight = weight.astype(x.dtype)
  if jax.default_backend() != "cpu":
    return jnp.tensordot(x, weight, axes=1, precision=precision, preferred_element_type=dtype)
  x_2d, weight_2d = x.reshape(-1, x.shape[-1]), weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
  out = jnp.dot(x_2d, weight_2d, precision=precision, preferred_element_type=dtype)
  return out.reshape(*x.shape[:-1], *weight.shape[1:])


def feed_forward(params: dict[str, Any], x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
  """down(silu(gate(x)) · up(x)); gate and up are [D, F], down is [F, D]."""
  return linear(jax.nn.silu(linear(x, params["gate"])) * linear(x, params["up"]), params["down"])
