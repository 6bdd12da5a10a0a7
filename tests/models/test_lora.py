"""LoRA: which matrices it adapts, how, and that only it trains."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import hf_toy, latent_toy

from sao_jax.config import LoRAConfig, ModelConfig
from sao_jax.models.attention import KINDS
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.lora import lora_specs, merge_lora
from sao_jax.models.transformer import param_specs, trunk
from sao_jax.parallel.params import path_names

QWEN3_MOE = ModelConfig(num_experts=4, d_model=32)
LATENT = dataclasses.replace(latent_toy.CONFIG, num_experts=4, num_dense_layers=1, d_ff_shared=8)
GROUPED = ("q", "k", "v", "o")
MODELS = {  # attention of every layer; feed-forward of dense layers and of those with experts
  "dense": (hf_toy.DENSE, GROUPED, {"dense_layers": ("mlp",)}),
  "moe": (QWEN3_MOE, GROUPED, {"moe_layers": ("moe",)}),
  "shared expert behind dense layers": (
    hf_toy.GLM,
    GROUPED,
    {"dense_layers": ("mlp",), "moe_layers": ("moe", "moe/shared")},
  ),
  "latent attention": (
    LATENT,
    ("q_a", "q_b", "kv_a", "kv_b", "o"),
    {"dense_layers": ("mlp",), "moe_layers": ("moe", "moe/shared")},
  ),
}


def random_lora(config, lora, seed=0):
  """Factors that matter, B included."""
  rng = np.random.default_rng(seed)
  specs = lora_specs(param_specs(config), lora)
  factors = jax.tree.map(lambda spec: jnp.asarray(rng.normal(0, 0.3, spec.shape), jnp.float32), specs)
  return factors | {"scale": specs["scale"].initialize(jax.random.key(0))}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_adapted(name):
  """An explicit list for every kind of model; norms, biases, routers, indexers, embeddings and heads never are."""
  config, attention, feed_forward = MODELS[name]
  specs = param_specs(config)
  parts = [f"{layers}/{part}" for layers in feed_forward for part in feed_forward[layers]]
  of = {
    "attention": {f"{layers}/attention/{leaf}" for layers in feed_forward for leaf in attention},
    "mlp": {f"{part}/{leaf}" for part in parts for leaf in ("gate", "up", "down")},
  }
  for targets in (("attention",), ("mlp",), ("attention", "mlp")):
    chosen = lora_specs(specs, LoRAConfig(rank=3, targets=targets))
    expected = set().union(*(of[target] for target in targets))
    assert set(path_names(chosen["a"])) == set(path_names(chosen["b"])) == expected <= set(path_names(specs))
  router = {path for path in path_names(specs) if path.endswith("router")}
  assert not router & expected


@pytest.mark.parametrize("name", MODELS)
def test_merging_by_hand(name):
  """W + alpha / rank · A B for every layer and expert by itself, as 2-D matrices in float64; the rest as it is."""
  config, _, _ = MODELS[name]
  lora = LoRAConfig(rank=3, alpha=6.0)
  params = hf_toy.random_params(config)
  factors = random_lora(config, lora)
  merged = merge_lora(params | {"lora": factors})
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  flat = lambda tree: {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
  a, b, before, after = flat(factors["a"]), flat(factors["b"]), flat(params), flat(merged)
  for path, leaf in before.items():
    if path not in a:
      assert after[path] is leaf
      continue
    stacked = 2 if "/moe/" in path and "/shared/" not in path else 1
    for at in np.ndindex(leaf.shape[:stacked]):
      factor_a, factor_b = (np.float64(tree[path][at]) for tree in (a, b))
      update = factor_a.reshape(-1, 3) @ factor_b.reshape(3, -1)
      expected = np.float64(leaf[at]) + 2.0 * update.reshape(leaf[at].shape)
      np.testing.assert_allclose(after[path][at], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_computes_with_the_sum(remat):
  """The forward pass, layer by layer in a loop, equals that of the merged model; B = 0 is the model itself."""
  lora = LoRAConfig(rank=2, alpha=4.0)
  config = dataclasses.replace(hf_toy.GLM, num_layers=6, remat=remat, lora=lora)
  params, factors = hf_toy.random_params(config), random_lora(config, lora)
  ids = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 7)), jnp.int32)
  ones = jnp.ones_like(ids)
  positions = jnp.tile(jnp.arange(7, dtype=jnp.int32), (2, 1))
  run = jax.jit(lambda params: trunk(params, config, ids, positions, attend=packed_attend(ones))[0])
  adapted = run(params | {"lora": factors})
  np.testing.assert_allclose(adapted, run(merge_lora(params | {"lora": factors})), atol=1e-5)
  plain = run(params)
  assert np.abs(adapted - plain).max() > 0.1
  start = factors | {"b": jax.tree.map(jnp.zeros_like, factors["b"])}
  np.testing.assert_array_equal(run(params | {"lora": start}), plain)


def test_the_start():
  """A from N(0, 1 / inputs), B zero, both fp32 whatever the model is stored in; layouts follow the matrices."""
  config = ModelConfig(d_model=512, d_ff=256, num_heads=8, head_dim=32, num_kv_heads=4, param_dtype="bfloat16")
  specs = lora_specs(param_specs(config), LoRAConfig(rank=16))
  a, b = (specs[factor]["dense_layers"] for factor in ("a", "b"))
  assert a["attention"]["q"].shape == (2, 512, 16) and b["attention"]["q"].shape == (2, 16, 8, 32)
  assert a["attention"]["o"].shape == (2, 8, 32, 16) and b["attention"]["o"].shape == (2, 16, 512)
  assert a["attention"]["o"].axes == ("layers", "heads", None, None)
  assert b["mlp"]["gate"].axes == ("layers", None, "mlp")
  key = jax.random.key(0)
  for name, inputs in (("q", 512), ("o", 256)):
    first = a["attention"][name].initialize(key)
    assert first.dtype == jnp.float32 and abs(np.std(first) * inputs**0.5 - 1) < 0.05
    assert not b["attention"][name].initialize(key).any() and b["attention"][name].dtype == "float32"
  experts = lora_specs(param_specs(QWEN3_MOE), LoRAConfig(rank=4))["b"]["moe_layers"]["moe"]["down"]
  assert experts.shape == (2, 4, 4, 32) and experts.axes == ("layers", "expert", None, "expert_embed")


def test_dtypes_of_the_sum():
  """fp32 where it is computed with or published from; for exports and critics what the model is stored in."""
  config = dataclasses.replace(hf_toy.DENSE, param_dtype="bfloat16")
  lora = LoRAConfig(rank=2)
  params = hf_toy.random_params(config) | {"lora": random_lora(config, lora)}
  merged, kept = merge_lora(params), merge_lora(params, keep_dtype=True)
  assert merged["dense_layers"]["attention"]["q"].dtype == jnp.float32
  assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype("bfloat16")}
  plain = {name: leaf for name, leaf in params.items() if name != "lora"}
  assert merge_lora(plain) is plain


def test_a_matrix_name_means_the_same_in_every_kind_of_attention():
  """LoRA's table is the union of all kinds: another number of input axes would change the factors of the others."""
  inputs = [(name, count) for kind in KINDS for name, count in kind.matrices.items()]
  assert len(dict(inputs)) == len(set(inputs))
