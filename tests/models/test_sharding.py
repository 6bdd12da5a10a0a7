"""Eight devices compute what one computes: forward and gradients of the policy and the critic."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys.sharding_toy import loss_and_gradients, make_batch

from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.models.critic import critic_specs
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import check_mesh_divides_model, make_mesh
from sao_jax.parallel.params import init_params

DENSE = ModelConfig(vocab_size=12, num_layers=2, d_model=8, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=8)
MOE = dataclasses.replace(DENSE, num_experts=4, d_ff_expert=4, d_ff_shared=4, num_dense_layers=1, remat="full")
MOE = dataclasses.replace(MOE, router="sigmoid", num_expert_groups=2, rotary_fraction=0.5)
MOE = dataclasses.replace(MOE, attention_bias=True, attention_out_bias=True)
MESHES = {
  "data x context": MeshConfig(data=4, fsdp=1, context=2),
  "fsdp x expert x tensor": MeshConfig(fsdp=2, expert=2, tensor=2),
}


@functools.cache
def on_one_device(network, config):
  specs = param_specs(config) if network == "policy" else critic_specs(config)
  params = jax.tree.map(lambda x: x + 0.1 * jnp.sin(x * 1e4), init_params(specs, jax.random.key(0)))
  return specs, params, loss_and_gradients(network, config, None)(params, make_batch())


@pytest.mark.parametrize("network", ["policy", "critic"])
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_equals_one_device(mesh, model, network):
  config = {"dense": DENSE, "moe": MOE}[model]
  specs, params, expected = on_one_device(network, config)
  mesh = make_mesh(MESHES[mesh])
  layout = Layout(mesh)
  check_mesh_divides_model(layout, specs)
  shardings = layout.param_shardings(specs)
  batch = jax.device_put(make_batch(), layout.sharding("batch", "sequence"))
  got = loss_and_gradients(network, config, mesh)(jax.device_put(params, shardings), batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
  assert got[1]["final_norm"].shape == (8,)
