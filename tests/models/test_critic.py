"""The critic: its head, its values, and the explicit list of what is frozen, for each family."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import hf_toy
from toys.glm5_toy import TINY as GLM5

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import family_of_model
from sao_jax.models import critic
from sao_jax.models.attention import attention_kind
from sao_jax.models.attention.grouped import GROUPED
from sao_jax.models.critic import critic_params_from_policy, critic_specs, frozen_critic_paths, make_critic_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params, path_names
from sao_jax.types import TrajectoryBatch

MATRICES = ["q", "k", "v", "o"]
NORMS = ["q_norm", "k_norm"]
BIASES = ["q_bias", "k_bias", "v_bias"]
LATENT = ["q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"]
AIR = dataclasses.replace(hf_toy.GLM, qk_norm=False)
QWEN3_MOE = ModelConfig(num_experts=4)
LLAMA = dataclasses.replace(hf_toy.DENSE, qk_norm=False)
ALL_BIASES = dataclasses.replace(LLAMA, attention_bias=True, attention_out_bias=True)
DEEPSEEK = dataclasses.replace(GLM5, index_topk=0, index_num_heads=0, index_head_dim=0, indexer_types=())
FROZEN = {  # layers and leaves of attention, per family
  "qwen3": (hf_toy.DENSE, ["dense_layers"], MATRICES + NORMS),
  "qwen3_moe": (QWEN3_MOE, ["moe_layers"], MATRICES + NORMS),
  "glm4_moe": (hf_toy.GLM, ["dense_layers", "moe_layers"], MATRICES + NORMS + BIASES),
  "glm4_moe without q/k norm": (AIR, ["dense_layers", "moe_layers"], MATRICES + BIASES),
  "glm_moe_dsa": (GLM5, ["dense_layers", "moe_layers"], LATENT),
  "llama": (LLAMA, ["dense_layers"], MATRICES),  # and mistral
  "qwen2": (dataclasses.replace(LLAMA, attention_bias=True), ["dense_layers"], MATRICES + BIASES),
  "llama with biases": (ALL_BIASES, ["dense_layers"], MATRICES + BIASES + ["o_bias"]),
  "seed_oss": (dataclasses.replace(LLAMA, attention_out_bias=True), ["dense_layers"], MATRICES + ["o_bias"]),
  "deepseek_v3": (DEEPSEEK, ["dense_layers", "moe_layers"], LATENT),  # and glm4_moe_lite
}
CORRECTION = {"moe_layers/moe/correction_bias"}
NO_GRADIENT = {  # frozen whatever the configuration says, per family
  "glm4_moe": CORRECTION,
  "deepseek_v3": CORRECTION,
  "glm_moe_dsa": CORRECTION | {f"indexer_layers/{leaf}" for leaf in ("q", "k", "k_norm", "k_norm_bias", "weights")},
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen(name):
  """All of the attention modules, biases included, and nothing else; more by configuration."""
  config, layers, leaves = FROZEN[name]
  family = name.split()[0]
  assert family_of_model(config).model_type == family
  expected = {f"{layer}/attention/{leaf}" for layer in layers for leaf in leaves}
  fixed = NO_GRADIENT.get(family, set())
  assert frozen_critic_paths(config) == expected | fixed
  declared = set(path_names(critic_specs(config)))
  assert expected == {path for path in declared if "/attention/" in path}
  assert fixed == {path for path in declared if path.startswith("indexer") or path.endswith("correction_bias")}
  assert frozen_critic_paths(config, attention=False) == fixed  # in value pretraining too
  router = frozen_critic_paths(config, attention=False, router=True) - fixed
  assert router == {path for path in declared if path.endswith("moe/router")}
  assert bool(router) == bool(config.num_experts)


def test_a_parameter_that_no_list_names_is_noticed(monkeypatch):
  names = tuple(name for name in GROUPED.names if name != "k_bias")
  monkeypatch.setattr(critic, "attention_kind", lambda config: dataclasses.replace(GROUPED, names=names))
  assert frozen_critic_paths(hf_toy.DENSE)
  with pytest.raises(ValueError, match="dense_layers/attention/k_bias"):
    frozen_critic_paths(hf_toy.GLM)


@pytest.mark.parametrize("config", [dataclasses.replace(hf_toy.GLM, qk_norm=True), GLM5], ids=["grouped", "latent"])
def test_a_kind_of_attention_names_its_parameters(config):
  """What its object says of them is true of those that it declares."""
  kind, declared = attention_kind(config), path_names(param_specs(config))
  specs = kind.specs(config)
  assert specs.keys() <= set(kind.names) and kind.matrices.keys() <= specs.keys()
  assert {name for name, spec in specs.items() if len(spec.shape) >= 2 and "bias" not in name} == kind.matrices.keys()
  for name, inputs in kind.matrices.items():
    width = int(np.prod(specs[name].shape[:inputs]))
    assert width in (config.d_model, config.q_lora_rank, config.kv_lora_rank, config.num_heads * specs["o"].shape[1])
  assert kind.fixed(config) <= set(declared)
  assert {name.split("/")[0] for name in kind.fixed(config)} <= kind.common_specs(config).keys()


@pytest.mark.parametrize("initializer", ["zeros", "normal"])
def test_the_head(initializer):
  """Zeros, or N(0, initializer_range) that depends on the key; the trunk is the policy's."""
  config = dataclasses.replace(hf_toy.DENSE, d_model=512, num_layers=1, initializer_range=0.05)
  policy = hf_toy.random_params(config)
  make = lambda seed: critic_params_from_policy(policy, config, 4, initializer, jax.random.key(seed))
  first, second = make(0), make(1)
  for name in ("embed", "final_norm", "dense_layers"):
    jax.tree.map(np.testing.assert_array_equal, first[name], policy[name])
  heads = [np.asarray(params["value_head"]) for params in (first, second)]
  if initializer == "zeros":
    assert not np.any(heads)
  else:
    assert heads[0].std() == pytest.approx(0.05, rel=0.1) and abs(heads[0].mean()) < 0.005
    assert np.any(heads[0] != heads[1])


DENSE = ModelConfig(vocab_size=7, num_layers=2, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=8)
MOE = dataclasses.replace(DENSE, num_experts=2, num_experts_per_token=1, d_ff_expert=4)
MIXED = dataclasses.replace(MOE, num_dense_layers=1, d_ff_shared=4)


def batch_of(ids):
  ids = jnp.asarray(ids, jnp.int32)
  numbers, flags = jnp.zeros(ids.shape, jnp.float32), jnp.ones(ids.shape, jnp.bool_)
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
  ones = jnp.ones_like(ids)
  return TrajectoryBatch(ids, ones, ones, positions, flags, flags, numbers, jnp.zeros_like(ids), numbers, flags)


def test_zero_head_gives_zero_values_and_no_trunk_gradient():
  """G7."""
  policy = init_params(param_specs(MOE), jax.random.key(0))
  params = critic_params_from_policy(policy, MOE)
  apply = make_critic_apply(MOE)
  batch = batch_of([[1, 2, 3, 4]])

  def loss(params):
    outputs = apply(params, batch)
    return jnp.sum((outputs - 1) ** 2), outputs

  (_, outputs), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  assert outputs.shape == (1, 4, 1) and outputs.dtype == jnp.float32
  np.testing.assert_array_equal(outputs, np.zeros((1, 4, 1)))
  assert np.abs(grads.pop("value_head")).max() > 0
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("num_outputs", [1, 5])
def test_the_language_model_head_is_never_sliced(num_outputs):
  """G7: the head is new whatever the checkpoint holds; the trunk is a copy, not the policy's own buffers."""
  policy = init_params(param_specs(MIXED), jax.random.key(0))
  params = critic_params_from_policy(policy, MIXED, num_outputs)
  specs = critic_specs(MIXED, num_outputs)
  assert path_names(params) == path_names(specs) and "head" not in params
  assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda s: s.shape, specs)
  np.testing.assert_array_equal(params["value_head"], np.zeros((8, num_outputs), np.float32))
  np.testing.assert_array_equal(params["embed"], policy["embed"])
  assert params["embed"].unsafe_buffer_pointer() != policy["embed"].unsafe_buffer_pointer()
  assert jax.tree.map(jnp.shape, init_params(specs, jax.random.key(1))) == jax.tree.map(jnp.shape, params)


def test_state_alignment():
  """Entry t reads the tokens up to t: a later token changes only later entries."""
  params = init_params(critic_specs(DENSE), jax.random.key(0))
  params["value_head"] = jnp.ones((8, 1), jnp.float32)
  apply = jax.jit(make_critic_apply(DENSE))
  a, b = apply(params, batch_of([[1, 2, 3, 4]])), apply(params, batch_of([[1, 2, 5, 4]]))
  np.testing.assert_allclose(a[0, :2], b[0, :2], atol=1e-6)
  assert np.abs(a - b)[0, 2:].min() > 0


def reading_critic(initializer="normal"):
  policy = init_params(param_specs(DENSE), jax.random.key(0))
  return critic_params_from_policy(policy, DENSE, 1, initializer, jax.random.key(1), reads_logprobs=True)


def test_a_critic_that_reads_logprobs_starts_like_one_that_does_not():
  """One parameter more, which starts as the head does; while it is zero the log-probs change nothing."""
  zeros, normal, specs = reading_critic("zeros"), reading_critic(), critic_specs(DENSE, reads_logprobs=True)
  assert jax.tree.map(jnp.shape, zeros) == jax.tree.map(lambda spec: spec.shape, specs)
  assert set(path_names(specs)) - set(path_names(critic_specs(DENSE))) == {"logprob_embed"}
  assert not zeros["logprob_embed"].any() and normal["logprob_embed"].all()
  assert "logprob_embed" not in frozen_critic_paths(DENSE, router=True, embeddings=True)

  # The same head, with and without the new parameter.
  zeros["value_head"] = normal["value_head"]
  batch = batch_of([[1, 2, 3, 4]]).replace(behavior_logprobs=jnp.array([[-1.0, -2.0, -0.5, -3.0]]))
  without = {name: leaf for name, leaf in zeros.items() if name != "logprob_embed"}
  apply = jax.jit(make_critic_apply(DENSE))
  np.testing.assert_array_equal(apply(zeros, batch), apply(without, batch))


def test_a_value_reads_the_logprobs_of_sampled_tokens_up_to_its_own():
  """Not later ones, not another segment's, and none of tokens that were not sampled, where they are NaN."""
  params, apply = reading_critic(), jax.jit(make_critic_apply(DENSE))
  mask = jnp.array([[False, True, True, True, False, True]])
  logprobs = np.array([[np.nan, -1.0, -2.0, -0.5, np.nan, -3.0]], np.float32)
  segments, positions = jnp.array([[1, 1, 1, 1, 2, 2]]), jnp.array([[0, 1, 2, 3, 0, 1]])
  batch = batch_of([[1, 2, 3, 4, 1, 2]]).replace(action_mask=mask, segment_ids=segments, positions=positions)

  def values(place=0, logprob=np.nan):
    changed = logprobs.copy()
    changed[0, place] = logprob
    return np.asarray(apply(params, batch.replace(behavior_logprobs=jnp.asarray(changed))))[0, :, 0]

  as_recorded = values()
  assert np.isfinite(as_recorded).all()
  np.testing.assert_array_equal(values(4, -7.0), as_recorded)  # not sampled
  moved = np.abs(values(2, -4.0) - as_recorded) > 1e-6
  np.testing.assert_array_equal(moved, [False, False, True, True, False, False])
  assert np.isnan(values(2, np.nan)[2:4]).all()  # nobody takes a missing one for a certain token


PARAMETERS = ("q", "k", "v", "o", "q_norm", "k_norm")
LISTED = {
  "dense": (DENSE, [f"dense_layers/attention/{n}" for n in PARAMETERS]),
  "moe": (MOE, [f"moe_layers/attention/{n}" for n in PARAMETERS]),
  "mixed": (MIXED, [f"{s}_layers/attention/{n}" for s in ("dense", "moe") for n in PARAMETERS]),
  "no q/k norm": (dataclasses.replace(MOE, qk_norm=False), [f"moe_layers/attention/{n}" for n in PARAMETERS[:4]]),
}


@pytest.mark.parametrize("name", LISTED)
def test_frozen_paths_are_an_explicit_list(name):
  config, expected = LISTED[name]
  paths = frozen_critic_paths(config)
  assert paths == frozenset(expected)
  names = set(path_names(critic_specs(config)))
  assert paths <= names
  assert paths == {name for name in names if name.split("/")[1:2] == ["attention"]}  # all of the attention modules
  assert not {name for name in paths if "attention_norm" in name}  # the norm before is no part of the module


def test_optional_frozen_parts():
  assert frozen_critic_paths(MIXED, attention=False) == frozenset()
  assert frozen_critic_paths(MIXED, attention=False, router=True) == {"moe_layers/moe/router"}
  assert frozen_critic_paths(DENSE, attention=False, router=True) == frozenset()
  assert frozen_critic_paths(MIXED, attention=False, embeddings=True) == {"embed"}
  everything = frozen_critic_paths(MIXED, router=True, embeddings=True)
  assert everything <= set(path_names(critic_specs(MIXED))) and len(everything) == 14
