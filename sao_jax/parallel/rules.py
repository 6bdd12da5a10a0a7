"""Logical axes (what a dimension means) to mesh axes (where it lives): the only table of the sharding layout."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class AxisRules:
  """The mesh axes of every logical axis; None replicates. Another layout is `dataclasses.replace(rules, ...)`."""

  batch: MeshAxes = ("data", "fsdp", "expert")
  slots: MeshAxes = ("data", "fsdp", "expert")
  sequence: MeshAxes = "context"
  embed: MeshAxes = "fsdp"  # of parameters; the model dimension of activations is never sharded
  latent: MeshAxes = "fsdp"  # the compressed dimension of latent attention, where no "embed" stands beside it
  heads: MeshAxes = "tensor"
  kv_heads: MeshAxes = "tensor"
  mlp: MeshAxes = "tensor"
  vocab: MeshAxes = "tensor"
  expert: MeshAxes = "expert"
  layers: MeshAxes = None

  def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
    """The mesh axes of one logical axis, () for None."""
    axes = None if logical is None else getattr(self, logical)
    return (axes,) if isinstance(axes, str) else tuple(axes or ())

  def spec(self, *logical: str | None) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions are these logical axes (None: not sharded)."""
    return PartitionSpec(*(None if name is None else getattr(self, name) for name in logical))


DEFAULT_RULES = AxisRules()


def constrain(x: jax.Array, *logical: str | None, mesh: Mesh | None, rules: AxisRules = DEFAULT_RULES) -> jax.Array:
  """Tells the partitioner where `x` lives; does nothing without a mesh or on one device."""
  if mesh is None or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rules.spec(*logical)))
