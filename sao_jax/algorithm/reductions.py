"""Reductions over sampled tokens: each names its mask and its denominator, and none lets a masked NaN through."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

ROUNDING = 8.0 * float(jnp.finfo(jnp.float32).eps)  # a spread of this share of the largest entry is no spread


def masked_sum(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
  """Sum of `x` where `mask` is True, in fp32."""
  return jnp.sum(jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0))


def masked_count(mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
  """Number of True entries as fp32 (exact up to 2^24)."""
  return jnp.sum(mask, dtype=jnp.float32)


def masked_mean(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
  """Mean of `x` over the True entries; NaN, meaning undefined, if there are none."""
  return masked_sum(x, mask) / masked_count(mask)


def masked_mean_and_std(
  x: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean and population standard deviation of `x` over the True entries; (0, 0) if there are none.

  The deviation is exactly 0 when it is within the rounding error of fp32: three times 0.1 has no spread, although its
  computed mean may miss 0.1 by one unit in the last place. Callers divide by it and rely on that.
  """
  x = jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)
  count = jnp.maximum(masked_count(mask), 1.0)
  scale = jnp.max(jnp.abs(x), initial=0.0)
  # In units of the largest entry the squares neither overflow nor underflow.
  unit = x / jnp.where(scale > 0.0, scale, 1.0)
  mean = jnp.sum(unit) / count
  std = jnp.sqrt(jnp.sum(jnp.where(mask, jnp.square(unit - mean), 0.0)) / count)
  std = jnp.where(std <= ROUNDING, 0.0, std)
  return mean * scale, std * scale
