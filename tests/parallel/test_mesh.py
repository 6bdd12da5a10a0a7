"""Meshes that cannot work are refused by field and remedy; publish never aliases; one host needs no start-up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import ONE_DEVICE, AxisRules, Layout
from sao_jax.parallel.mesh import AXES, check_mesh_divides_model, make_mesh
from sao_jax.parallel.process import WHOLE, initialize_processes
from sao_jax.parallel.publish import make_publish


def test_minus_one_takes_what_is_left():
  mesh = make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2))
  assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2, "context": 1}
  assert mesh.axis_names == AXES and mesh.axis_types == (AxisType.Auto,) * 5
  assert make_mesh(MeshConfig(), jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
  ("config", "field"),
  [
    (MeshConfig(data=3), "mesh"),
    (MeshConfig(data=2, fsdp=2), "mesh"),
    (MeshConfig(data=16, fsdp=1), "mesh"),
    (MeshConfig(data=-1, fsdp=-1), "mesh.fsdp"),
    (MeshConfig(expert=0), "mesh.expert"),
    (MeshConfig(tensor=-2), "mesh.tensor"),
  ],
)
def test_refused_meshes(config, field):
  with pytest.raises(ConfigError) as error:
    make_mesh(config)
  assert error.value.field == field and "remedy" in str(error.value)


@pytest.mark.parametrize(
  ("mesh", "model", "field", "parameter"),
  [
    (MeshConfig(tensor=4, fsdp=2), ModelConfig(num_kv_heads=2), "mesh.tensor", "attention/k"),
    (MeshConfig(fsdp=8), ModelConfig(d_model=36), "mesh.fsdp", "attention/k"),
    (MeshConfig(expert=4, fsdp=2), ModelConfig(num_experts=6), "mesh.expert", "moe/down"),
    (MeshConfig(tensor=2), ModelConfig(vocab_size=271), "mesh.tensor", "embed"),
  ],
)
def test_mesh_that_does_not_divide_the_model(mesh, model, field, parameter):
  with pytest.raises(ConfigError, match=parameter) as error:
    check_mesh_divides_model(Layout(make_mesh(mesh)), param_specs(model))
  assert error.value.field == field


def test_mesh_that_divides_the_model():
  layout = Layout(make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)))
  check_mesh_divides_model(layout, param_specs(ModelConfig(num_experts=4)))


def test_constrain_places_or_does_nothing():
  x = jnp.ones((8, 4), jnp.float32)
  assert ONE_DEVICE.constrain(x, "batch", None) is x
  mesh = make_mesh(MeshConfig(data=8, fsdp=1))
  placed = jax.jit(lambda x: Layout(mesh).constrain(x, "batch", None))(x)
  assert placed.sharding.shard_shape(x.shape) == (1, 4)
  replicated = jax.jit(lambda x: Layout(mesh, AxisRules(batch=None)).constrain(x, "batch", None))(x)
  assert replicated.sharding.shard_shape(x.shape) == (8, 4)


def test_two_dimensions_on_one_mesh_axis_are_refused_by_name():
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
  layout = Layout(mesh, AxisRules(embed="tensor"))
  specs = param_specs(ModelConfig())
  with pytest.raises(ConfigError, match=r"(?s)both lie on the mesh axis 'tensor'.*remedy.*AxisRules"):
    check_mesh_divides_model(layout, specs)
  message = r"(?s)dimensions 1 \('embed'\) and 2 \('heads'\) of dense_layers/attention/q both .* axis 'tensor'.*remedy"
  attention = {"dense_layers": {"attention": {"q": specs["dense_layers"]["attention"]["q"]}}}
  with pytest.raises(ConfigError, match=message):
    layout.param_shardings(attention)
  assert layout.spec("embed", None, None) == PartitionSpec("tensor", None, None)  # one of them alone may lie there
  with pytest.raises(ConfigError, match=r"dimensions 0 \('batch'\) and 2 \('expert'\) of an array"):
    jax.jit(lambda x: Layout(mesh).constrain(x, "batch", None, "expert"))(jnp.ones((8, 1, 8), jnp.float32))


@pytest.mark.parametrize("mesh", [None, MeshConfig(fsdp=4, tensor=2)])
def test_shards(mesh):
  layout = Layout(mesh and make_mesh(mesh))
  assert layout.is_sharded == bool(mesh)
  shards = layout.shards("batch"), layout.shards("batch", "heads"), layout.shards()
  assert shards == ((4, 8, 1) if mesh else (1, 1, 1))
  assert hash(layout) == hash(Layout(layout.mesh)) and layout == Layout(layout.mesh)


def pointers(tree):
  return {shard.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards}


@pytest.mark.parametrize("target", ["same", "in place", "other device"])
def test_publish_copies_and_survives_donation(target):
  mesh = make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
  sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
  params = jax.device_put({"w": jnp.arange(8, dtype=jnp.float32), "n": jnp.arange(4, dtype=jnp.int32)}, sharding)
  expected = jax.tree.map(np.asarray, params)
  targets = {"same": sharding, "in place": None, "other device": SingleDeviceSharding(jax.devices()[7])}
  copy = make_publish(targets[target])(params)
  assert not pointers(copy) & pointers(params)
  jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(params))
  jax.tree.map(np.testing.assert_array_equal, copy, expected)
  if target == "other device":
    assert copy["w"].devices() == {jax.devices()[7]}


def test_publish_casts_floating_leaves_only():
  copy = make_publish(None, "bfloat16")({"w": jnp.ones(2, jnp.float32), "n": jnp.ones(2, jnp.int32)})
  assert copy["w"].dtype == jnp.bfloat16 and copy["n"].dtype == jnp.int32


def test_one_host_needs_no_start_up():
  initialize_processes()
  assert not jax.distributed.is_initialized()
  assert WHOLE.brings and tuple(WHOLE) == (0, 1)
