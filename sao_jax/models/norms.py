"""RMSNorm and LayerNorm, always in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
