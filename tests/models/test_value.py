"""The value network: zero head, no language-model head, and a frozen set that is an explicit list."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import ModelConfig
from sao_jax.models.critic import critic_params_from_policy, critic_specs, frozen_critic_paths, make_critic_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params, path_names
from sao_jax.types import TrajectoryBatch

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


ATTENTION = ("q", "k", "v", "o", "q_norm", "k_norm")
FROZEN = {
  "dense": (DENSE, [f"dense_layers/attention/{n}" for n in ATTENTION]),
  "moe": (MOE, [f"moe_layers/attention/{n}" for n in ATTENTION]),
  "mixed": (MIXED, [f"{s}_layers/attention/{n}" for s in ("dense", "moe") for n in ATTENTION]),
  "no q/k norm": (dataclasses.replace(MOE, qk_norm=False), [f"moe_layers/attention/{n}" for n in ATTENTION[:4]]),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_paths_are_an_explicit_list(name):
  config, expected = FROZEN[name]
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
