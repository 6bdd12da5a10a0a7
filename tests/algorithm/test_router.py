"""Figures of the routers in the train step's metrics, and the bias that evens out the load."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.algorithm.diagnostics import router_metrics
from sao_jax.config import CriticConfig, LoRAConfig
from sao_jax.learner import setup
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.lora_start import fresh_critic
from sao_jax.learner.packing import pack
from sao_jax.models.router import router_bias_paths, update_router_bias
from sao_jax.types import RouterStatistics

NAMES = ("entropy", "load_max", "idle_experts", "dropped", "replayed", "agreement")


def statistics(load, tokens, entropy, replayed, agreeing, dropped):
  arrays = (jnp.asarray(x, jnp.float32) for x in (tokens, load, entropy, replayed, agreeing, dropped))
  return RouterStatistics(*arrays)


def test_golden_numbers():
  """Two rows of 3 + 1 tokens, two layers, four experts, two of them for each token."""
  router = statistics(
    load=[[[3, 3, 0, 0], [2, 2, 1, 1]], [[1, 0, 0, 1], [0, 0, 1, 1]]],  # layer 0: 4 3 0 1, layer 1: 2 2 2 2
    tokens=[3, 1],
    entropy=[[1.0, 2.0], [0.5, 0.5]],
    replayed=[[4, 4], [0, 0]],
    agreeing=[[4, 2], [0, 0]],
    dropped=[[0, 1], [0, 0]],
  )
  metrics = router_metrics(router)
  expected = [4.0 / 8, 2.0, 1 / 8, 1.0, 8 / 16, 6 / 8]
  np.testing.assert_allclose([metrics[f"router_{name}"] for name in NAMES], expected, rtol=1e-6)
  assert len(metrics) == len(NAMES)


def test_nothing_to_average_over_is_undefined():
  zero = np.zeros((2, 2))
  metrics = router_metrics(statistics(np.zeros((2, 2, 4)), [0, 0], zero, zero, zero, zero))
  assert metrics["router_dropped"] == 0
  assert all(np.isnan(metrics[f"router_{name}"]) for name in NAMES if name != "dropped")


def test_the_bias_follows_the_load():
  """An even share is 2: the busy expert goes down, the idle one up, those that have their share stay."""
  bias = jnp.asarray([[0.5, 0.0, 0.0, -0.25]], jnp.float32)
  params = {"embed": jnp.ones(3), "moe_layers": {"mlp_norm": jnp.ones(1), "moe": {"correction_bias": bias, "up": bias}}}
  changed = update_router_bias(params, jnp.asarray([[4.0, 2.0, 2.0, 0.0]], jnp.float32), 0.125)
  np.testing.assert_array_equal(changed["moe_layers"]["moe"]["correction_bias"], [[0.375, 0.0, 0.0, -0.125]])
  rest = {"embed": changed["embed"], "up": changed["moe_layers"]["moe"]["up"]}
  jax.tree.map(np.testing.assert_array_equal, rest, {"embed": params["embed"], "up": bias})


def config_of(micro_batches=1, **algorithm):
  """A layer with four experts, whose router has a bias."""
  return training_toy.replace(
    training_toy.get_config(),
    model={"num_experts": 4, "router": "sigmoid", "initializer_range": 0.3},
    algorithm={"micro_batches": micro_batches, **algorithm},
    rollout={"row_counts": (16,)},
  )


def with_experts(config, trajectories):
  """Random ones, as a sampler might have recorded them."""
  rng = np.random.default_rng(5)
  given = []
  for one in trajectories:
    experts = rng.permuted(np.tile(np.arange(4), (len(one), config.model.num_layers, 1)), axis=-1)[..., :2].astype(
      np.int16
    )
    experts[-1] = -1
    given.append(dataclasses.replace(one, routed_experts=experts))
  return given


@functools.cache
def learner_of(config, devices):
  """The learner and its compiled step."""
  learner = setup.make_learner(config, devices)
  return learner, setup.make_step(learner)


def one_step(config, devices=None, *, empty=False):
  """The state before and after one step, and its metrics, all on the host."""
  learner, step = learner_of(config, devices or tuple(jax.devices()[:1]))
  policy = setup.init_policy_params(learner, seed=0)
  state = setup.make_state(learner, policy, fresh_critic(learner, policy, 0))
  before = jax.device_get(state)
  batch = packed_batch(learner, with_experts(config, make_trajectories())).rows
  if empty:
    batch = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
  state, metrics = step(state, batch)
  return before, jax.device_get(state), jax.device_get(metrics)


def bias_of(network):
  return network.params["moe_layers"]["moe"]["correction_bias"]


def test_in_the_train_step():
  """Figures do not depend on micro-batches; the bias moves by the rate, and only after an update."""
  before, state, whole = one_step(config_of(router_bias_update=0.125))
  _, _, parts = one_step(config_of(4, router_bias_update=0.125))
  for name in NAMES:
    np.testing.assert_allclose(whole[f"router_{name}"], parts[f"router_{name}"], rtol=1e-5, err_msg=name)
  assert whole["router_dropped"] == whole["router_replayed"] == 0 and np.isnan(whole["router_agreement"])
  assert 0 < whole["router_entropy"] <= np.log(4) and 1 < whole["router_load_max"] <= 2
  moved = np.unique(np.abs(bias_of(state.policy) - bias_of(before.policy)))
  assert set(moved.tolist()) <= {0.0, 0.125} and moved.max() == 0.125
  np.testing.assert_array_equal(bias_of(state.critic), bias_of(before.critic))
  before, state, _ = one_step(config_of(router_bias_update=0.125), empty=True)
  np.testing.assert_array_equal(bias_of(state.policy), bias_of(before.policy))
  assert not [path for path in state.policy.opt_state[1][0].mu if "correction_bias" in path]
  assert router_bias_paths(config_of().model) == {"moe_layers/moe/correction_bias"}
  assert not router_bias_paths(training_toy.get_config().model)


def test_on_eight_devices_equals_one():
  """Replay, LoRA and the moving bias: recorded experts travel with their rows, factors lie where their matrices do.

  Also those of a critic on the policy's base, for which the bias stands still.
  """
  config = config_of(router_replay=True, router_bias_update=0.01, value_head_initializer="normal")
  config = dataclasses.replace(config, critic=CriticConfig(LoRAConfig(rank=4)))
  lora = LoRAConfig(rank=2, alpha=8.0)
  config = training_toy.replace(
    config,
    model={"num_heads": 4, "num_kv_heads": 2, "d_ff_shared": 16, "lora": lora},
    policy_optimizer={"learning_rate": 1e-2, "eps": 1e-3},
    critic_optimizer={"learning_rate": 1e-2, "eps": 1e-3},
  )
  before, one, expected = one_step(config)
  mesh = training_toy.replace(config, mesh={"data": 1, "fsdp": 2, "expert": 2, "tensor": 2})
  _, eight, got = one_step(mesh, tuple(jax.devices()))
  losses = ("policy_loss", "policy_grad_norm", "value_loss_first", "value_loss_last", "critic_grad_norm")
  for name in (*losses, *(f"router_{name}" for name in NAMES)):
    np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, err_msg=name)
  assert got["router_dropped"] == 0 and 0.8 < got["router_replayed"] < 1 and 0.3 < got["router_agreement"] < 0.7
  assert got["policy_grad_norm"] > 0
  same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  jax.tree.map(same, (eight.policy.params, eight.critic.params), (one.policy.params, one.critic.params))
  changed = lambda name: np.any(bias_of(getattr(one, name)) != bias_of(getattr(before, name)))
  assert changed("policy") and not changed("critic")
  state = setup.abstract_state(setup.make_learner(mesh))
  for network, rank in ((state.policy, 2), (state.critic, 4)):
    gate = network.params["lora"]["b"]["moe_layers"]["moe"]["gate"]
    assert gate.sharding.shard_shape(gate.shape) == (1, 2, rank, 8)  # [L, E, rank, F]: over "expert" and "tensor"
    assert gate.sharding == network.opt_state[1][0].mu["lora/b/moe_layers/moe/gate"].sharding


def test_recorded_experts_are_left_out_unless_replayed():
  config = config_of()
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  assert packed_batch(learner, with_experts(config, make_trajectories())).rows.routed_experts is None
  rows = pack(make_trajectories(), (32,), (16,), routed_shape=(2, 2))
  assert rows.routed_experts.shape == (16, 32, 2, 2) and (rows.routed_experts == -1).all()
