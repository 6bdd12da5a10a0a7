"""ParamSpec: one declaration, from which values, abstract trees, shardings and names follow."""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.parallel.params import (
  ParamSpec,
  abstract_params,
  checksum,
  count_params,
  init_params,
  path_names,
  stack_specs,
)

SPECS = {
  "a": {"w": ParamSpec((4, 8), ("embed", "mlp")), "norm": ParamSpec((4,), (None,), "ones")},
  "z": ParamSpec((8,), ("mlp",), "zeros"),
}


def test_names_shapes_and_values():
  params = init_params(SPECS, jax.random.key(0))
  assert path_names(params) == path_names(SPECS) == ["a/norm", "a/w", "z"]
  abstract = abstract_params(SPECS)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
  np.testing.assert_array_equal(params["a"]["norm"], np.ones(4, np.float32))
  np.testing.assert_array_equal(params["z"], np.zeros(8, np.float32))
  assert 0 < float(jnp.std(params["a"]["w"])) < 0.04
  assert count_params(SPECS) == count_params(params) == 4 * 8 + 4 + 8


def test_a_leaf_does_not_depend_on_the_others():
  alone = init_params({"a": {"w": SPECS["a"]["w"]}}, jax.random.key(3))
  np.testing.assert_array_equal(alone["a"]["w"], init_params(SPECS, jax.random.key(3))["a"]["w"])
  renamed = init_params({"b": {"w": SPECS["a"]["w"]}}, jax.random.key(3))
  assert not np.array_equal(alone["a"]["w"], renamed["b"]["w"])


def test_initializers_and_dtype():
  own = ParamSpec((2, 3), (None, None), lambda key, shape, dtype: jnp.full(shape, 7, dtype), "bfloat16")
  value = own.initialize(jax.random.key(0))
  assert value.dtype == jnp.bfloat16 and float(value[0, 0]) == 7
  with pytest.raises(ValueError, match="initializer"):
    ParamSpec((2,), (None,), "uniform").initialize(jax.random.key(0))
  with pytest.raises(ValueError, match="axes"):
    ParamSpec((2, 3), (None,))


def test_stacked_specs_get_a_layer_axis():
  stacked = stack_specs(SPECS, 5)
  assert stacked["a"]["w"].shape == (5, 4, 8) and stacked["a"]["w"].axes == ("layers", "embed", "mlp")


def test_shardings_follow_the_rules():
  mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
  specs = param_specs(ModelConfig(num_experts=4))
  shardings = Layout(mesh).param_shardings(specs)
  assert path_names(shardings) == path_names(specs)
  moe = shardings["moe_layers"]["moe"]
  assert moe["gate"].spec == PartitionSpec(None, "expert", ("fsdp", "context"), "tensor")
  assert moe["down"].spec == PartitionSpec(None, "expert", "tensor", ("fsdp", "context"))
  everywhere = ("fsdp", "context", "expert")
  assert shardings["embed"].spec == PartitionSpec("tensor", everywhere)
  assert shardings["moe_layers"]["attention"]["q"].spec == PartitionSpec(None, everywhere, "tensor", None)
  assert ONE_DEVICE.spec("batch", "sequence", None) == PartitionSpec(("data", "fsdp", "expert"), "context", None)
  params = jax.jit(lambda key: init_params(specs, key), out_shardings=shardings)(jax.random.key(0))
  assert params["moe_layers"]["moe"]["gate"].sharding.shard_shape(params["moe_layers"]["moe"]["gate"].shape) == (
    2,
    2,
    32,
    32,
  )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_checksum_tells_one_changed_bit_and_no_devices(dtype):
  """The sum of all bits, by numpy: of float32 as uint32, of bfloat16 as uint16."""
  values = (np.random.default_rng(0).standard_normal((8, 16)) * 100).astype(jnp.dtype(dtype))
  tree = {"a": {"w": jnp.asarray(values)}, "b": jnp.zeros((8,), dtype)}
  mesh = make_mesh(MeshConfig(data=1, fsdp=-1))
  sharded = jax.device_put(tree, jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp")))
  assert checksum(tree) == checksum(sharded) != checksum({"a": {"v": tree["a"]["w"]}, "b": tree["b"]})

  bits = values.view(f"uint{8 * values.dtype.itemsize}")
  total = int(bits.astype(np.uint64).sum() % 2**32)
  expected = hashlib.sha256(repr([("a/w", total), ("b", 0)]).encode()).hexdigest()[:16]
  assert checksum(tree) == expected
  bits[3, 5] ^= 1
  assert checksum({"a": {"w": jnp.asarray(values)}, "b": tree["b"]}) != expected
