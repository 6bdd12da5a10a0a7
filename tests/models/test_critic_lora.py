"""A critic with LoRA: its gradients, what it shares with the policy, what it starts from, what is frozen."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import hf_toy, sharding_toy
from toys.glm5_toy import TINY as GLM5

from sao_jax.config import LoRAConfig
from sao_jax.models.critic import ADDED, critic_params_from_policy, critic_specs, frozen_critic_paths, make_critic_apply
from sao_jax.models.critic_lora import critic_lora_params, critic_lora_specs, frozen_lora_paths, join_base
from sao_jax.models.lora import lora_specs, merge_lora
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import abstract_params, path_name, path_names

LORA = LoRAConfig(rank=3, alpha=6.0)
CORRECTION = "moe_layers/moe/correction_bias"


def flat(tree):
  return {path_name(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def random_params(config, seed=0):
  """Of a policy, from numpy: nothing compiles."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda spec: jnp.asarray(rng.normal(0, 0.1, spec.shape), jnp.float32), param_specs(config))


def random_factors(config, lora, seed):
  """Factors that matter, B included."""
  rng, specs = np.random.default_rng(seed), lora_specs(param_specs(config), lora)
  factors = jax.tree.map(lambda spec: jnp.asarray(rng.normal(0, 0.3, spec.shape), jnp.float32), specs)
  return factors | {"scale": jnp.asarray(lora.alpha / lora.rank, jnp.float32)}


def merged_by_hand(base, factors):
  """W + scale · A B of every layer and expert by itself, in float64; and A, B and W as matrices, by path."""
  weights, a, b, matrices = flat(base), flat(factors["a"]), flat(factors["b"]), {}
  scale = float(factors["scale"])
  for path in a:
    stacked = 2 if "/moe/" in path and "/shared/" not in path else 1
    shape, rank = weights[path].shape, a[path].shape[-1]
    for at in np.ndindex(shape[:stacked]):
      left, right = a[path][at].reshape(-1, rank), b[path][at].reshape(rank, -1)
      matrices[path, at] = left, right
      weights[path][at] += scale * (left @ right).reshape(shape[stacked:])
  return weights, matrices


def test_gradients_are_those_of_the_merged_full_critic_projected_on_the_factors():
  """dA = s dW Bᵀ and dB = s Aᵀ dW, where dW is the gradient of a critic that trains in full; the head's as it is."""
  config = dataclasses.replace(hf_toy.GLM, num_layers=2)
  policy = random_params(config) | {"lora": random_factors(config, LORA, 1)}
  critic = critic_lora_params(policy, random_factors(config, LORA, 2), config, shares_base=True, initializer="normal")
  critic["lora"] = factors = random_factors(config, LORA, 3)
  batch = sharding_toy.make_batch()

  @functools.partial(jax.jit, static_argnums=2)
  def gradients(params, base, join):
    def loss(params):
      outputs = make_critic_apply(config)(join_base(params, base) if join else params, batch)
      return jnp.sum(outputs[..., 0] * jnp.cos(jnp.arange(batch.token_ids.size)).reshape(batch.token_ids.shape))

    return jax.value_and_grad(loss)(params)

  # The same critic in full, merged by hand.
  weights, matrices = merged_by_hand({name: leaf for name, leaf in policy.items() if name != "lora"}, factors)
  full = critic_params_from_policy(policy, config)
  full = jax.tree_util.tree_map_with_path(lambda path, leaf: weights.get(path_name(path), leaf), full)
  full = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), full | {"value_head": critic["value_head"]})
  (value, grads), (expected_value, of_full) = gradients(critic, policy, True), gradients(full, policy, False)
  assert value == pytest.approx(float(expected_value), rel=1e-4)
  np.testing.assert_allclose(grads["value_head"], of_full["value_head"], rtol=1e-4, atol=1e-4)

  got_a, got_b, whole, scale = (
    flat(grads["lora"]["a"]),
    flat(grads["lora"]["b"]),
    flat(of_full),
    float(factors["scale"]),
  )
  for (path, at), (left, right) in matrices.items():
    of_weight = whole[path][at].reshape(len(left), -1)
    for got, expected in ((got_a, of_weight @ right.T), (got_b, left.T @ of_weight)):
      expected = scale * expected.reshape(got[path][at].shape)
      np.testing.assert_allclose(got[path][at], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max(), err_msg=path)
  assert len({path for path, _ in matrices}) == 2 * 4 + 3 + 3 + 3


@pytest.mark.parametrize("config", [hf_toy.DENSE, hf_toy.GLM, GLM5], ids=["dense", "glm4_moe", "glm_moe_dsa"])
def test_what_a_critic_has_of_its_own_and_what_of_it_trains(config):
  """Beside a policy with LoRA: factors, head, and the biases that follow the policy's load; nothing is copied twice."""
  specs = critic_specs(config, reads_logprobs=True)
  frozen = {part: frozen_critic_paths(config, attention=part == "attention") for part in ("attention", "nothing")}
  factors = {f"lora/{name}" for name in path_names(lora_specs(specs, LORA)) if name != "scale"}
  of_attention = {name for name in factors if "/attention/" in name}
  own = {*ADDED, *({CORRECTION} & set(path_names(specs)))}
  for shares in (True, False):
    declared = critic_lora_specs(config, specs, LORA, shares_base=shares)
    names = set(path_names(declared))
    assert names == factors | {"lora/scale"} | (own if shares else set(path_names(specs)))
    trained = names - frozen_lora_paths(declared, frozen["nothing"])
    assert trained == factors | set(ADDED) and of_attention
    assert names - frozen_lora_paths(declared, frozen["attention"]) == trained - of_attention

  # All that the critic reads, by reference.
  policy = abstract_params(param_specs(config)) | {"lora": {}}
  params = abstract_params(critic_lora_specs(config, specs, LORA, shares_base=True))
  joined = join_base(params, policy)
  assert {*path_names(joined)} == {*path_names(specs), *(f"lora/{name}" for name in path_names(params["lora"]))}
  for path, leaf in jax.tree_util.tree_leaves_with_path(joined):
    of = params if path_name(path).split("/")[0] in (*ADDED, "lora") or path_name(path) == CORRECTION else policy
    assert leaf is functools.reduce(lambda node, key: node[key.key], path, of)


def test_it_starts_as_the_policy_is_by_now():
  """With more factors, of another scale, than the policy has: W + s A B stays; the other factors are fresh."""
  config, given = dataclasses.replace(hf_toy.GLM, num_layers=2), LoRAConfig(rank=2, alpha=8.0, targets=("attention",))
  policy = random_params(config) | {"lora": random_factors(config, given, 1)}
  fresh = random_factors(config, LORA, 2)
  fresh["b"] = jax.tree.map(jnp.zeros_like, fresh["b"])
  critic = critic_lora_params(policy, fresh, config, shares_base=True)
  joined = merge_lora(join_base(critic, policy))
  expected = merge_lora(policy)
  for name in ("embed", "dense_layers", "moe_layers", "final_norm"):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), joined[name], expected[name])
  assert critic["lora"]["scale"] == fresh["scale"] != policy["lora"]["scale"] and not critic["value_head"].any()
  a, b = (critic["lora"][factor]["moe_layers"] for factor in ("a", "b"))
  np.testing.assert_array_equal(a["attention"]["q"][..., 2], fresh["a"]["moe_layers"]["attention"]["q"][..., 2])
  assert b["attention"]["q"][:, :2].any() and not b["attention"]["q"][:, 2].any() and not b["moe"]["up"].any()
  of_critic, of_policy = critic["moe_layers"]["moe"], policy["moe_layers"]["moe"]
  assert of_critic["correction_bias"] is not of_policy["correction_bias"]  # it is donated with the critic
