"""Three train steps on eight simulated devices equal those on one, for the policy and the critic."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.learner import setup
from sao_jax.learner.packing import pack, shard_batch
from sao_jax.models.critic import critic_params_from_policy

MESHES = {
  "data=8": {"data": 8, "fsdp": 1},
  "fsdp=2, expert=2, tensor=2": {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
}


def make_config(**mesh):
  return training_toy.replace(
    training_toy.get_config(),
    model={"num_heads": 4, "num_kv_heads": 2, "num_experts": 4, "num_layers": 2, "d_ff_shared": 16},
    # A gradient that is nearly zero must not turn rounding into a whole Adam step.
    policy_optimizer={"learning_rate": 1e-2, "eps": 1e-3},
    critic_optimizer={"learning_rate": 1e-2, "eps": 1e-3},
    mesh=mesh,
  )


def three_steps(config, devices):
  """The gradients (from Adam's first moments after one step), the state after three steps, and all metrics."""
  learner = setup.make_learner(config, tuple(devices))
  policy = setup.init_policy_params(learner, seed=0)
  state = setup.make_state(learner, policy, critic_params_from_policy(policy, config.model))
  step = setup.make_step(learner)
  batch = shard_batch(pack(make_trajectories(), (32,), (16,), setup.rows_multiple(learner)), learner.layout)
  all_metrics = []
  for index in range(3):
    state, metrics = step(state, batch)
    all_metrics.append(jax.device_get(metrics))
    if index == 0:
      moments = jax.device_get((state.policy.opt_state, state.critic.opt_state))
  return moments, state, all_metrics


@pytest.fixture(scope="module")
def one_device():
  return three_steps(make_config(data=1, fsdp=1), jax.devices()[:1])


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES.keys())
def test_eight_devices_equal_one(mesh, one_device):
  moments, state, metrics = three_steps(make_config(**mesh), jax.devices())
  expected_moments, expected_state, expected_metrics = one_device

  def assert_same(path, a, b):
    scale = np.abs(np.asarray(b)).max()
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))

  jax.tree_util.tree_map_with_path(assert_same, moments, expected_moments)
  jax.tree_util.tree_map_with_path(assert_same, jax.device_get(state), jax.device_get(expected_state))
  for got, want in zip(metrics, expected_metrics):
    for name in (
      "policy_loss",
      "value_loss_first",
      "value_loss_last",
      "policy_grad_norm",
      "critic_grad_norm",
      "entropy",
    ):
      np.testing.assert_allclose(got[name], want[name], rtol=1e-4, err_msg=name)
  assert metrics[0]["rejected_low"] > 0 and metrics[0]["policy_grad_norm"] > 0


def test_parameters_and_moments_are_really_spread(one_device):
  del one_device
  learner = setup.make_learner(make_config(**MESHES["fsdp=2, expert=2, tensor=2"]))
  abstract = setup.abstract_state(learner)
  gate = abstract.policy.params["moe_layers"]["moe"]["gate"]
  assert gate.sharding.shard_shape(gate.shape) == tuple(np.array(gate.shape) // (1, 2, 2, 2))
  moments = [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.policy.opt_state)
    if "moe_layers/moe/gate" in jax.tree_util.keystr(path, simple=True, separator="/")
  ]
  assert len(moments) == 2 and all(leaf.sharding == gate.sharding for leaf in moments)
