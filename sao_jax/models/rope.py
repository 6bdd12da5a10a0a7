"""Rotary position embedding with angles in fp32, the same for sampler and learner.

bf16 inverse frequencies would be off by 37 rad at position 32768 (theta 1e6, head_dim 128), so nothing here is ever
computed in the activation dtype.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import YarnConfig

NO_YARN = YarnConfig()


def rope_frequencies(rotary_dim: int, theta: float, yarn: YarnConfig = NO_YARN) -> Float[Array, " half"]:
  """theta^(-2i / rotary_dim), i = 0 ... rotary_dim / 2 - 1, fp32; with YaRN the slow ones are divided by its factor.

  Source: arXiv 2309.00071, section 3.2 ("NTK-by-parts"). Its ramp goes by turns, and so does that of Llama 3.1; the
  code of its authors, and of all who use YaRN, has one that goes by the index of the frequency.
  """
  exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
  frequencies = jnp.power(jnp.float32(theta), -exponents)
  if yarn.factor == 1.0:
    return frequencies

  slow = (_slow_by_turns if yarn.ramp == "turns" else _slow_by_index)(frequencies, rotary_dim, theta, yarn)
  return frequencies / yarn.factor * slow + frequencies * (1.0 - slow)


def _slow_by_turns(
  frequencies: Float[Array, " half"], rotary_dim: int, theta: float, yarn: YarnConfig
) -> Float[Array, " half"]:
  """1 for frequencies that turn less often than beta_slow, 0 for those that turn more often than beta_fast."""
  del rotary_dim, theta
  turns = yarn.original_positions / (2 * math.pi) * frequencies
  width = yarn.beta_fast - yarn.beta_slow or 0.001
  return jnp.clip((yarn.beta_fast - turns) / width, 0.0, 1.0)


def _slow_by_index(
  frequencies: Float[Array, " half"], rotary_dim: int, theta: float, yarn: YarnConfig
) -> Float[Array, " half"]:
  """The same, linear in the index of a frequency."""

  def index_of(turns: float) -> float:  # the (fractional) index of the frequency that turns so often
    return rotary_dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

  low, high = index_of(yarn.beta_fast), index_of(yarn.beta_slow)
  if yarn.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, rotary_dim - 1)
  width = high - low or 0.001
  return jnp.clip((jnp.arange(len(frequencies), dtype=jnp.float32) - low) / width, 0.0, 1.0)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
  """0.1 · mscale · ln(factor) + 1: how much sharper attention over a context stretched by this factor has to be."""
  return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


def yarn_attention_factor(yarn: YarnConfig) -> float:
  """The factor on cos and sin, without which queries and keys of a stretched context lose sharpness."""
  return yarn.attention_factor or yarn_mscale(yarn.factor)


def rope_table(
  positions: Int[Array, "B T"], rotary_dim: int, theta: float, yarn: YarnConfig = NO_YARN
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
  """cos and sin of position · `rope_frequencies`, fp32."""
  frequencies, scale = rope_frequencies(rotary_dim, theta, yarn), yarn_attention_factor(yarn)

  def table(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    angles = positions[..., None].astype(jnp.float32) * frequencies
    if scale == 1.0:
      return jnp.cos(angles), jnp.sin(angles)
    return scale * jnp.cos(angles), scale * jnp.sin(angles)

  batch, length = positions.shape
  if length % 2:
    return table(positions)
  # In two halves, by a loop: XLA fuses plain code into its readers, and every layer and head would compute sines again.
  halves = jax.lax.map(table, positions.reshape(batch, 2, -1).swapaxes(0, 1))
  return jax.tree.map(lambda half: half.swapaxes(0, 1).reshape(batch, length, -1), halves)


def apply_rope(
  x: Float[Array, "B T N h"], table: tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
) -> Float[Array, "B T N h"]:
  """Rotates the pairs (x[i], x[i + half]) of every head by the token's angles; fp32 inside, dtype of `x` outside.

  A table of fewer than h / 2 angles rotates the first 2 · half dimensions of a head and leaves the rest.
  """
  rotary_dim = 2 * table[0].shape[-1]
  if rotary_dim < x.shape[-1]:
    return jnp.concatenate([apply_rope(x[..., :rotary_dim], table), x[..., rotary_dim:]], axis=-1)
  cos, sin = (part[:, :, None, :] for part in table)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x.dtype)


def apply_interleaved_rope(
  x: Float[Array, "B T N h"], table: tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
) -> Float[Array, "B T N h"]:
  """As `apply_rope`, but of the pairs (x[2i], x[2i + 1]). The result holds all first halves, then all second ones.

  That order is the same for queries and keys, so that their products do not depend on it.
  """
  return apply_rope(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), table)
