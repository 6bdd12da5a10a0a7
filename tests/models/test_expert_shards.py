"""Experts over a mesh: the results of one device for every mesh axis, also where nothing of the load is even."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.models import expert_buffer, expert_shards
from sao_jax.models.moe import moe_feed_forward, set_experts_apart
from sao_jax.parallel.layout import ONE_DEVICE, AxisRules, Layout
from sao_jax.parallel.mesh import make_mesh

CONFIG = ModelConfig(d_model=8, num_experts=8, d_ff_expert=4, num_experts_per_token=3, moe_implementation="blocked")
AXES = {"router": ("embed", None), "gate": ("expert", "expert_embed", "mlp"), "up": ("expert", "expert_embed", "mlp")}
AXES |= {"down": ("expert", "mlp", "expert_embed")}
MESHES = {
  "fsdp": MeshConfig(fsdp=8),
  "expert": MeshConfig(fsdp=1, expert=8),  # the only one in which tokens travel
  "fsdp x expert": MeshConfig(fsdp=2, expert=4),
  "tensor": MeshConfig(fsdp=2, tensor=4),
  "context": MeshConfig(fsdp=1, context=8),
  "data x expert x context": MeshConfig(data=2, fsdp=1, expert=2, context=2),
  "fsdp x expert x tensor": MeshConfig(fsdp=2, expert=2, tensor=2),
}
PARTS = {"fsdp": 2, "fsdp x expert x tensor": 8}


@functools.cache
def operands():
  rng = np.random.default_rng(0)
  shapes = {"router": (8, 8), "gate": (8, 8, 4), "up": (8, 8, 4), "down": (8, 4, 8)}
  params = {name: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32) for name, shape in shapes.items()}
  return params, jnp.asarray(rng.normal(size=(8, 8, 8)), jnp.float32)


def routings():
  """Replayed experts: nobody's, all of one expert or device, and padding without experts of its own between them."""
  own = np.full((8, 8, 3), -1, np.int16)
  one = np.full((8, 8, 3), 5, np.int16)
  of_one_device = np.broadcast_to(np.array([4, 5, 4], np.int16), own.shape)  # with expert=4
  mixed = np.where(np.arange(8)[None, :, None] < 4, one, own)
  return {"its own": own, "all tokens to one expert": one, "of one device": of_one_device, "mixed": mixed}


@functools.cache
def value_and_gradients(layout, config=CONFIG):
  def value(params, x, replayed):
    out, routed = moe_feed_forward(params, x, config, layout, replayed)
    return jnp.sum(jnp.sin(3 * out)), (out, routed)

  return jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("mesh", MESHES)
def test_every_axis_and_routing_equals_one_device(monkeypatch, mesh):
  """In buffers, however few pairs there are: 192 pairs, of which 32 fit into one with eight devices."""
  monkeypatch.setattr(expert_buffer, "FEW_PAIRS", 0)
  if mesh == "fsdp x expert":  # tokens travel here too
    monkeypatch.setattr(expert_shards, "dispatch_pays", lambda *_: True)
  params, x = operands()
  layout = Layout(make_mesh(MESHES[mesh]))
  sharded = {name: jax.device_put(leaf, layout.sharding(*AXES[name])) for name, leaf in params.items()}
  tokens = layout.sharding("batch", "sequence", None)
  for replayed in routings().values():
    expected = value_and_gradients(ONE_DEVICE)(params, x, replayed)
    got = value_and_gradients(layout)(sharded, jax.device_put(x, tokens), jax.device_put(replayed, tokens))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, expected)
    np.testing.assert_array_equal(got[0][1][1].computed, np.full((8, 8), 3))  # nothing was dropped


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp x expert x tensor"])
def test_tokens_in_parts_equal_one_device(monkeypatch, mesh):
  """A row has 32 bytes: all of 4 tokens, or those of 2 in a buffer that is shared by two devices, fit into 400."""
  monkeypatch.setattr(expert_buffer, "FEW_PAIRS", 0)
  monkeypatch.setattr(expert_shards, "PART_BYTES", 400)
  params, x = operands()
  layout = Layout(make_mesh(MESHES[mesh]))
  own = jnp.zeros((8 // layout.shards("batch"), 8, 8))
  assert expert_shards.number_of_parts(own, jnp.zeros((*own.shape[:2], 3), jnp.int32), layout) == PARTS[mesh]
  sharded = {name: jax.device_put(leaf, layout.sharding(*AXES[name])) for name, leaf in params.items()}
  tokens = layout.sharding("batch", "sequence", None)
  replayed = routings()["mixed"]
  expected = value_and_gradients(ONE_DEVICE)(params, x, replayed)
  run = value_and_gradients.__wrapped__(layout)  # compiled with parts, which the cached ones are not
  got = run(sharded, jax.device_put(x, tokens), jax.device_put(replayed, tokens))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, expected)
  np.testing.assert_array_equal(got[0][1][1].computed, np.full((8, 8), 3))


def test_gradients_of_bf16_activations_are_added_up_in_fp32():
  """Eight devices with one token each: a sum of bf16 numbers would lose what the last ones add."""
  config = dataclasses.replace(CONFIG, num_experts=1, num_experts_per_token=1)
  rng = np.random.default_rng(0)
  shapes = {"router": (8, 1), "gate": (1, 8, 4), "up": (1, 8, 4), "down": (1, 4, 8)}
  params = {name: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32) for name, shape in shapes.items()}
  x = jnp.asarray(rng.normal(size=(8, 1, 8)), jnp.bfloat16)

  def gradients(layout):
    value = lambda params, x: jnp.sum(moe_feed_forward(params, x, config, layout)[0].astype(jnp.float32))
    return jax.jit(jax.grad(value))

  of_one = gradients(ONE_DEVICE)
  one_by_one = [of_one(params, x[i : i + 1]) for i in range(8)]
  expected = jax.tree.map(lambda *parts: np.sum(np.float64(parts), 0), *one_by_one)
  got = gradients(Layout(make_mesh(MeshConfig(fsdp=8))))(params, x)
  for name in ("gate", "up", "down"):
    np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", ["one device", "fsdp x expert x tensor", "expert"])
def test_a_layer_is_read_out_of_the_stack(monkeypatch, mesh):
  """The same outputs as with the layer's own weights; not where a layer's weights must be gathered or cast first."""
  monkeypatch.setattr(expert_buffer, "FEW_PAIRS", 0)
  params, x = operands()
  rules = AxisRules(expert_embed=None)
  layout = ONE_DEVICE if mesh == "one device" else Layout(make_mesh(MESHES[mesh]), rules)
  nothing = jnp.full_like(params["router"], jnp.nan)
  moe = {name: jnp.stack([leaf * jnp.nan, leaf, leaf * jnp.nan]) for name, leaf in params.items()}
  others, experts = set_experts_apart({"norm": nothing, "moe": moe}, jnp.dtype("float32"), layout)
  assert set(others["moe"]) == {"router"} and set(experts) == {"gate", "up", "down"}

  run = jax.jit(lambda layer: moe_feed_forward({"router": params["router"]} | experts, x, CONFIG, layout, layer=layer))
  expected = value_and_gradients(ONE_DEVICE)(params, x, routings()["its own"])[0][1]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), run(jnp.int32(1)), expected)


def test_weights_that_are_cast_or_gathered_are_not_read_out_of_the_stack():
  layers = {"moe": {name: jnp.zeros((2, 8, 8, 8), jnp.bfloat16) for name in ("router", "gate", "up", "down")}}
  gathered = Layout(make_mesh(MeshConfig(fsdp=2, expert=4)))
  assert set_experts_apart(layers, jnp.dtype("float32"), ONE_DEVICE) == (layers, {})
  assert set_experts_apart(layers, jnp.dtype("bfloat16"), gathered) == (layers, {})
  assert set(set_experts_apart(layers, jnp.dtype("bfloat16"), ONE_DEVICE)[1]) == {"gate", "up", "down"}
