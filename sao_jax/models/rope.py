"""Rotary position embedding with angles in fp32, the same for sampler and learner.

bf16 inverse frequencies would be off by 37 rad at position 32768 (theta 1e6, head_dim 128), so nothing here is ever
computed in the activation dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope_table(
  positions: Int[Array, "B T"], head_dim: int, theta: float
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
  """cos and sin of position · theta^(-2i / head_dim), i = 0 ... head_dim / 2 - 1, fp32."""
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = jnp.power(jnp.float32(theta), -exponents)

  def table(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)

  batch, length = positions.shape
  if length % 2:
    return table(positions)
  # In two halves, by a loop: XLA fuses plain code into its readers, and every layer and head would compute sines again.
  halves = jax.lax.map(table, positions.reshape(batch, 2, -1).swapaxes(0, 1))
  return jax.tree.map(lambda half: half.swapaxes(0, 1).reshape(batch, length, -1), halves)


def apply_rope(
  x: Float[Array, "B T N h"], table: tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
) -> Float[Array, "B T N h"]:
  """Rotates the pairs (x[i], x[i + h/2]) of every head by the token's angles; fp32 inside, dtype of `x` outside."""
  cos, sin = (part[:, :, None, :] for part in table)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x.dtype)
