"""Other layouts than the default one: the same results when other mesh axes split tokens, experts and heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys.masked_attention import grouped_attention, packed_causal_mask

from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.moe import moe_feed_forward
from sao_jax.parallel.layout import ONE_DEVICE, AxisRules, Layout
from sao_jax.parallel.mesh import make_mesh

CONFIG = ModelConfig(d_model=8, num_experts=4, d_ff_expert=8, d_ff_shared=0)
AXES = {
  "router": ("embed", None),
  "gate": ("expert", "expert_embed", "mlp"),
  "up": ("expert", "expert_embed", "mlp"),
  "down": ("expert", "mlp", "expert_embed"),
}
DATA = ("data", "fsdp", "expert")
LAYOUTS = {
  "default": (MeshConfig(fsdp=2, expert=2, tensor=2), AxisRules()),
  "experts over two axes, whole widths": (
    MeshConfig(fsdp=2, expert=2, tensor=2),
    AxisRules(expert=("expert", "tensor"), mlp=None),
  ),
  "tokens over tensor too": (MeshConfig(fsdp=2, expert=2, tensor=2), AxisRules(batch=(*DATA, "tensor"))),
  "experts over context": (
    MeshConfig(fsdp=2, tensor=2, context=2),
    AxisRules(expert="context", expert_embed="fsdp"),
  ),
  "replicated experts": (MeshConfig(fsdp=4, tensor=2), AxisRules(expert=None)),
  "nothing of the experts is split": (MeshConfig(data=4, fsdp=2), AxisRules(expert=None, mlp=None)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_mixture_of_experts(name):
  rng = np.random.default_rng(0)
  shapes = {"router": (8, 4), "gate": (4, 8, 8), "up": (4, 8, 8), "down": (4, 8, 8)}
  params = {name: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32) for name, shape in shapes.items()}
  x = jnp.asarray(rng.normal(size=(8, 4, 8)), jnp.float32)

  def value_and_gradients(layout):
    def value(params, x):
      out, routed = moe_feed_forward(params, x, CONFIG, layout)
      return jnp.sum(jnp.sin(out)), routed.computed

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))

  expected = value_and_gradients(ONE_DEVICE)(params, x)
  mesh, rules = LAYOUTS[name]
  layout = Layout(make_mesh(mesh), rules)
  place = lambda array, *axes: jax.device_put(array, layout.sharding(*axes))
  sharded = {name: place(array, *AXES[name]) for name, array in params.items()}
  got = value_and_gradients(layout)(sharded, place(x, "batch", "sequence", None))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
  np.testing.assert_array_equal(got[0][1], np.full((8, 4), CONFIG.num_experts_per_token))  # each choice counts once


@pytest.mark.parametrize("rules", [AxisRules(), AxisRules(kv_heads=None)], ids=["split kv heads", "whole kv heads"])
def test_attention(rules):
  """Four heads on two devices with two kv heads: a device that holds both must not let its own two heads share them."""
  keys = jax.random.split(jax.random.key(0), 3)
  q, k, v = (jax.random.normal(key, (4, 6, n, 4), jnp.float32) for key, n in zip(keys, (4, 2, 2)))
  segments = jnp.asarray([[1, 1, 1, 2, 2, 0]] * 4, jnp.int32)
  expected = grouped_attention(q, k, v, packed_causal_mask(segments))
  layout = Layout(make_mesh(MeshConfig(fsdp=4, tensor=2)), rules)
  attend = jax.jit(lambda *arrays: packed_attend(segments, layout)(*arrays, jnp.int32(0), None)[0])
  got = attend(q, k, v)
  np.testing.assert_allclose(got[:, :5], expected[:, :5], rtol=1e-5, atol=1e-6)
