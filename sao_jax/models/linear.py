"""Operations on activations [..., D]: products with weights, the gated feed-forward, norms."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sao_jax.parallel.layout import ONE_DEVICE, Layout


def linear(
  x: Float[Array, "*batch D"],
  weight: Float[Array, "D ..."],
  layout: Layout = ONE_DEVICE,
  *,
  dtype: Any = None,
  precision: Any = None,
) -> Array:
  """x · weight over the last axis of `x` and the first of `weight`, which is cast to the dtype of `x`.

  `dtype` is that of the sums and the result (None: of `x`), `precision` as in `jax.lax.dot`.

  On a CPU the product is a plain 2-D one: the weight gradient of a rank-3 product is several times slower there.
  Elsewhere axes stay apart, so that each keeps its sharding.
  """
  weight = weight.astype(x.dtype)
  if layout.platform != "cpu":
    return jnp.tensordot(x, weight, axes=1, precision=precision, preferred_element_type=dtype)
  x_2d, weight_2d = x.reshape(-1, x.shape[-1]), weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
  out = jnp.dot(x_2d, weight_2d, precision=precision, preferred_element_type=dtype)
  return out.reshape(*x.shape[:-1], *weight.shape[1:])


@jax.named_scope("mlp")
def feed_forward(
  params: dict[str, Any], x: Float[Array, "*batch D"], layout: Layout = ONE_DEVICE
) -> Float[Array, "*batch D"]:
  """down(silu(gate(x)) · up(x)); gate and up are [D, F], down is [F, D]."""
  gate, up = linear(x, params["gate"], layout), linear(x, params["up"], layout)
  return linear(jax.nn.silu(gate) * up, params["down"], layout)


def rms_norm(x: Float[Array, "*batch D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*batch D"]:
  """x / sqrt(mean(x²) + eps) · scale over the last axis; computed in fp32, returned in the dtype of `x`."""
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(
  x: Float[Array, "*batch D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
  """(x - mean(x)) / sqrt(var(x) + eps) · scale + bias over the last axis; fp32 inside, dtype of `x` outside."""
  wide = x.astype(jnp.float32)
  centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
  variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
  normal = centred * jax.lax.rsqrt(variance + eps)
  return (normal * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
