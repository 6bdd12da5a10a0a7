"""Grouped matrix products: contiguous groups of rows, each times its own matrix; three implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.errors import ConfigError
from sao_jax.models.grouped_map import grouped_map

IMPLEMENTATIONS = ("blocked", "megablox", "ragged_dot")
MEGABLOX_TILE = (512, 1024, 1024)  # rows, contracted width, output width; clipped to the operands


def choose_implementation(name: str, platform: str | None = None) -> str:
  """What "auto" means on this platform (None: the default one): megablox on a TPU, blocked elsewhere.

  Raises:
    ConfigError: the name is none of `IMPLEMENTATIONS` and not "auto".
  """
  if name == "auto":
    return "megablox" if (platform or jax.default_backend()) == "tpu" else "blocked"
  if name not in IMPLEMENTATIONS:
    choices = ", ".join(("auto", *IMPLEMENTATIONS))
    raise ConfigError("model.moe_implementation", f"{name!r} is not known.", f"choose one of {choices}.")
  return name


def grouped_matmul(
  lhs: Float[Array, "M D"], rhs: Float[Array, "E D F"], group_sizes: Int[Array, " E"], implementation: str = "auto"
) -> Float[Array, "M F"]:
  """out[m] = lhs[m] · rhs[e] for the rows m of group e; 0 (and no gradient) for rows behind the last group.

  Args:
    lhs: rows, sorted by group.
    rhs: one matrix per group.
    group_sizes: int32 number of rows of every group, empty groups allowed; their sum is at most M.
    implementation: auto | blocked | megablox (TPU) | ragged_dot, see `choose_implementation`.
  """
  implementation = choose_implementation(implementation)
  if implementation == "blocked":
    return grouped_map(_matmul, rhs, lhs, group_sizes)
  # The other two leave rows behind the last group undefined, in the result and in the gradient.
  inside = jnp.arange(lhs.shape[0], dtype=jnp.int32)[:, None] < jnp.sum(group_sizes)
  lhs = jnp.where(inside, lhs, 0)
  if implementation == "megablox":
    out = megablox_matmul(lhs, rhs, group_sizes)
  else:
    out = jax.lax.ragged_dot(lhs, rhs, group_sizes)
  return jnp.where(inside, out, 0)


def megablox_matmul(
  lhs: Float[Array, "M D"], rhs: Float[Array, "E D F"], group_sizes: Int[Array, " E"], interpret: bool = False
) -> Float[Array, "M F"]:
  """The Pallas kernel of jax, with rows padded to whole tiles. `interpret` runs it without a TPU, slowly."""
  from jax.experimental.pallas.ops.tpu.megablox import gmm  # pulls in Pallas, which only TPU runs need

  num_rows = lhs.shape[0]
  row_tile = min(MEGABLOX_TILE[0], -(-num_rows // 128) * 128)
  lhs = jnp.pad(lhs, ((0, -num_rows % row_tile), (0, 0)))
  tiling = (row_tile, min(MEGABLOX_TILE[1], rhs.shape[1]), min(MEGABLOX_TILE[2], rhs.shape[2]))
  return gmm(lhs, rhs, group_sizes, lhs.dtype, tiling, None, None, False, interpret)[:num_rows]


def _matmul(matrix: jax.Array, rows: jax.Array) -> jax.Array:
  return jnp.dot(rows, matrix)
