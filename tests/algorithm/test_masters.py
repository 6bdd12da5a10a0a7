"""fp32 masters under bf16 parameters: small updates add up, and states are saved, sharded and read from old runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import training_toy

from sao_jax.algorithm.masters import Masters, with_masters
from sao_jax.algorithm.network import Network, gradient_step, leaf_name, trainable_leaves
from sao_jax.algorithm.optimizer import make_optimizer
from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.config import OptimizerConfig
from sao_jax.learner import restoring, sampler_side, setup

OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-6))  # the policy's default
SHAPE = (16, 64)


def make_params(dtype) -> dict:
  weights = 0.02 * jax.random.normal(jax.random.key(0), SHAPE, jnp.float32)
  return {"w": weights.astype(jnp.bfloat16).astype(dtype), "norm": jnp.ones(64, jnp.float32)}


def train(network: Network, state, steps: int):
  """Steps on a linear loss: its gradient never changes."""
  slopes = jax.random.normal(jax.random.key(1), SHAPE, jnp.float32)

  def loss_fn(params, rows):
    return jnp.sum(params["w"].astype(jnp.float32) * slopes) + jnp.sum(params["norm"]) + 0.0 * jnp.sum(rows), None

  def step(state, _):
    return gradient_step(network, state, loss_fn, jnp.zeros(1, jnp.float32))[:2]

  return jax.jit(lambda state: jax.lax.scan(step, state, None, length=steps))(state)


def run(dtype, steps: int, optimizer=None):
  network = Network(specs=None, apply=None, optimizer=optimizer or with_masters(OPTIMIZER))
  return train(network, network.start(make_params(dtype)), steps)[0]


def share_moved(before, after) -> float:
  return float(np.mean(np.asarray(before) != np.asarray(after)))


def test_small_updates_of_bf16_parameters_add_up_instead_of_rounding_away():
  """Thirty steps at 1e-6, and then a thousand, against the same run in fp32."""
  start = make_params(jnp.bfloat16)["w"]
  assert share_moved(start, run(jnp.bfloat16, 30, OPTIMIZER).params["w"]) < 0.1  # without masters, as it was
  after = run(jnp.bfloat16, 30)
  assert share_moved(start.astype(jnp.float32), after.opt_state.masters["w"]) > 0.999
  after, exact = run(jnp.bfloat16, 1000), run(jnp.float32, 1000)
  assert share_moved(start, after.params["w"]) > 0.95
  np.testing.assert_allclose(after.opt_state.masters["w"], exact.params["w"], rtol=0, atol=2e-5)
  assert after.params["w"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(after.params["w"], after.opt_state.masters["w"].astype(jnp.bfloat16))


def test_moments_are_fp32_and_fp32_parameters_have_no_masters():
  state = run(jnp.bfloat16, 1)
  assert set(state.opt_state.masters) == {"w"}
  assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
  plain = run(jnp.float32, 1)
  assert jax.tree.structure(plain.opt_state) == jax.tree.structure(OPTIMIZER.init(trainable_leaves(plain.params)))


def test_a_skipped_update_leaves_masters_as_they_are():
  network = Network(specs=None, apply=None, optimizer=with_masters(OPTIMIZER))
  state = run(jnp.bfloat16, 3)
  broken = lambda params, rows: (jnp.sum(params["w"].astype(jnp.float32)) * jnp.nan, None)
  after, update, _ = gradient_step(network, state, broken, jnp.zeros(1, jnp.float32))
  assert not update.applied
  jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.fixture(scope="module")
def learner():
  config = training_toy.replace(training_toy.get_config(), model={"param_dtype": "bfloat16", "dtype": "bfloat16"})
  return setup.make_learner(training_toy.replace(config, mesh={"fsdp": 2, "data": 4}))


def test_policy_and_critic_have_masters_of_what_they_train_where_the_parameters_are(learner):
  state = setup.abstract_state(learner)
  for network, frozen in ((state.policy, learner.policy.frozen), (state.critic, learner.critic.frozen)):
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(network.params)}
    stored = {name for name, leaf in leaves.items() if leaf.dtype == jnp.bfloat16 and name not in frozen}
    assert isinstance(network.opt_state, Masters) and network.opt_state.masters.keys() == stored != set()
    for name, master in network.opt_state.masters.items():
      assert master.dtype == jnp.float32 and master.shape == leaves[name].shape
      assert master.sharding == leaves[name].sharding
  assert any(not leaf.sharding.is_fully_replicated for leaf in state.policy.opt_state.masters.values())


def test_lora_needs_no_masters(learner):
  """Its base does not train, and its factors are fp32."""
  config = training_toy.replace(learner.config, model={"lora": dataclasses.replace(learner.config.model.lora, rank=2)})
  state = setup.abstract_state(setup.make_learner(config))
  assert state.policy.params["embed"].dtype == jnp.bfloat16 and not isinstance(state.policy.opt_state, Masters)


def test_the_sampler_gets_the_parameters_that_the_learner_computes_with(learner):
  """The rounded ones: the ratios of importance sampling are between equals."""
  state = setup.make_network_state(learner.policy, learner.layout, setup.init_policy_params(learner, 0))
  published = sampler_side.make_publisher(learner)(state.params)
  np.testing.assert_array_equal(published["embed"], state.params["embed"])
  np.testing.assert_array_equal(state.opt_state.masters["embed"], state.params["embed"].astype(jnp.float32))


def abstract(network: Network, dtype):
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shapes = jax.eval_shape(network.start, make_params(dtype))
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)


def test_masters_are_saved_and_a_checkpoint_without_them_lends_its_parameters(tmp_path, caplog):
  old, new = (Network(specs=None, apply=None, optimizer=each) for each in (OPTIMIZER, with_masters(OPTIMIZER)))
  states = {"old": run(jnp.bfloat16, 3, OPTIMIZER), "new": run(jnp.bfloat16, 3)}
  for name, state in states.items():
    with Checkpointer(tmp_path / name) as checkpointer:
      checkpointer.save(3, state)

  # As it was, bit for bit.
  with Checkpointer(tmp_path / "new") as checkpointer:
    again = restoring.restore_state(checkpointer, abstract(new, jnp.bfloat16))
  jax.tree.map(np.testing.assert_array_equal, again.state, states["new"])
  assert "masters" not in caplog.text

  # Saved by 0.1.0: the same parameters and moments, and masters that begin there.
  with Checkpointer(tmp_path / "old") as checkpointer:
    state = restoring.restore_state(checkpointer, abstract(new, jnp.bfloat16)).state
    assert "step 3 was saved without fp32 masters" in caplog.text
    assert restoring.restore_state(checkpointer, abstract(old, jnp.bfloat16)) is not None
  assert jax.tree.structure(state) == jax.tree.structure(states["new"])
  np.testing.assert_array_equal(state.opt_state.masters["w"], states["old"].params["w"].astype(jnp.float32))
  moment = lambda opt_state: optax.tree.get(opt_state, "mu")["w"]
  np.testing.assert_array_equal(moment(state.opt_state), moment(states["old"].opt_state).astype(jnp.float32))
  assert int(state.step) == 3 and int(train(new, state, 1)[0].step) == 4
