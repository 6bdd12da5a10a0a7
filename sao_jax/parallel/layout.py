"""The place of arrays: one table of rules maps logical axes (the meaning of a dimension) to mesh axes."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sao_jax.errors import ConfigError
from sao_jax.parallel.params import Params, Specs, path_name

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class AxisRules:
  """The mesh axes of every logical axis; None replicates. Another table is `dataclasses.replace(rules, ...)`.

  Together the axes of a matrix name every mesh axis but "data": parameters, their gradients and moments are split over
  all devices of a data shard. A layer's weights are gathered when it runs.
  """

  batch: MeshAxes = ("data", "fsdp", "expert")
  slots: MeshAxes = ("data", "fsdp", "expert")
  sequence: MeshAxes = "context"
  embed: MeshAxes = ("fsdp", "context", "expert")  # of parameters; that of activations is never sharded
  expert_embed: MeshAxes = ("fsdp", "context")  # of the experts' weights, which "expert" splits by expert
  latent: MeshAxes = ("fsdp", "context", "expert")  # of latent attention, where no "embed" stands beside it
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


DEFAULT_RULES = AxisRules()

# Of the sampler. A decode step has one token of each sequence: there is no sequence axis to split, and weights that
# had to be gathered would be gathered for every token. Only "fsdp", where it is asked for, trades that for memory.
SAMPLER_RULES = AxisRules(sequence=None, embed="fsdp", expert_embed="fsdp", latent="fsdp")


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and the rules that place arrays on it. Hashable, so that it can be a static argument of a jitted function.

  `Layout(mesh).constrain(x, "batch", "sequence", None)` keeps activations [B, T, D] where the batch lives.

  Attributes:
    mesh: the devices; None: one device, the default one.
    rules: logical axes to mesh axes.
  """

  mesh: Mesh | None = None
  rules: AxisRules = DEFAULT_RULES

  @property
  def is_sharded(self) -> bool:
    """Is there more than one device to spread arrays over?"""
    return self.mesh is not None and self.mesh.size > 1

  @property
  def is_here(self) -> bool:
    """Has this process any of the devices? Without, it can run none of their programs."""
    return self.mesh is None or any(each.process_index == jax.process_index() for each in self.mesh.devices.flat)

  @property
  def platform(self) -> str:
    """The platform that programs are compiled for ("cpu", "tpu", ...): that of the mesh, else of jax's default device.

    Nothing else decides by platform, so that a mesh of TPUs that are not here gets the programs of a TPU.
    """
    if self.mesh is not None:
      return self.mesh.devices.flat[0].platform
    device = jax.config.jax_default_device
    return device if isinstance(device, str) else (device or jax.local_devices()[0]).platform

  @property
  def spans_processes(self) -> bool:
    """Does no process have all of the devices? Then none can read an array that is split over them."""
    return self.mesh is not None and len({device.process_index for device in self.mesh.devices.flat}) > 1

  def shards(self, *logical: str | None) -> int:
    """The number of parts that these logical axes are split into, all together."""
    axes = [axis for name in logical for axis in self.rules.mesh_axes(name)]
    return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

  def spec(self, *logical: str | None, name: str = "an array") -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions are these logical axes (None: not sharded).

    Args:
      *logical: one per dimension.
      name: the array's name, for the error.

    Raises:
      ConfigError: two dimensions meet on one mesh axis, which can split only one of them.
    """
    owners: dict[str, int] = {}
    for dimension, own in enumerate(logical):
      for axis in self.rules.mesh_axes(own):
        if axis in owners:
          first = owners[axis]
          raise ConfigError(
            f"axis rules of {own!r}",
            f"dimensions {first} ({logical[first]!r}) and {dimension} ({own!r}) of {name} both lie on the mesh axis "
            f"{axis!r}.",
            f"give {logical[first]!r} or {own!r} another mesh axis in AxisRules, or None.",
          )
        owners[axis] = dimension
    return PartitionSpec(*(None if own is None else getattr(self.rules, own) for own in logical))

  def sharding(self, *logical: str | None, name: str = "an array") -> NamedSharding:
    """`spec` on the mesh, which must be there."""
    return NamedSharding(self.mesh, self.spec(*logical, name=name))

  def param_shardings(self, specs: Specs) -> Params:
    """The tree of `NamedSharding`s of declared parameters."""
    place = lambda path, spec: self.sharding(*spec.axes, name=path_name(path))
    return jax.tree_util.tree_map_with_path(place, specs)

  def constrain(self, x: jax.Array, *logical: str | None) -> jax.Array:
    """Tells the partitioner where `x` lives; does nothing on one device."""
    return jax.lax.with_sharding_constraint(x, self.sharding(*logical)) if self.is_sharded else x


ONE_DEVICE = Layout()
