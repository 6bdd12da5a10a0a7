"""AdamW, its schedule and weight-decay mask; frozen leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import algorithm_toy

from sao_jax.algorithm.network import replace_leaves, trainable_leaves
from sao_jax.algorithm.optimizer import decays, learning_rate_schedule, make_optimizer
from sao_jax.config import OptimizerConfig
from sao_jax.errors import ConfigError


@pytest.mark.parametrize(
  ("warmup", "updates_per_step", "expected"),
  [
    (0, 1, [1, 1, 1, 1, 1, 1]),
    (1, 1, [1, 1, 1, 1, 1, 1]),
    (4, 1, [0.25, 0.5, 0.75, 1, 1, 1]),
    (2, 2, [0.5, 0.5, 1, 1, 1, 1]),
    (3, 2, [1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1]),
  ],
)
def test_warmup_counts_train_steps(warmup, updates_per_step, expected):
  schedule = learning_rate_schedule(OptimizerConfig(learning_rate=1e-3, warmup_steps=warmup), updates_per_step)
  np.testing.assert_allclose([schedule(jnp.int32(i)) for i in range(6)], 1e-3 * np.array(expected), rtol=1e-6)


def test_one_step_of_adamw_by_hand():
  """Update = -lr * (m̂ / (√v̂ + eps) + wd * w), gradient clipped to norm 1; norms and biases are not decayed."""
  config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
  params = {"layers/attention_norm": jnp.ones((2, 3)), "layers/mlp/up": jnp.ones((2, 3)), "head_bias": jnp.ones(3)}
  optimizer = make_optimizer(config)
  grads = jax.tree.map(lambda x: -10.0 * x, params)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  np.testing.assert_allclose(updates["layers/attention_norm"], 0.1, rtol=1e-4)
  np.testing.assert_allclose(updates["head_bias"], 0.1, rtol=1e-4)
  np.testing.assert_allclose(updates["layers/mlp/up"], 0.1 - 0.05, rtol=1e-4)


def test_decay_goes_by_name_not_by_rank():
  tree = {
    "layers": {"attention_norm": 0, "attention": {"q": 0, "q_norm": 0}, "normalizer": 0},
    "final_norm": 0,
    "value_head": 0,
    "bias": 0,
  }
  assert decays(tree) == {
    "layers": {"attention_norm": False, "attention": {"q": True, "q_norm": False}, "normalizer": True},
    "final_norm": False,
    "value_head": True,
    "bias": False,
  }
  assert decays({"layers/attention/q_norm": 0, "layers/attention/q": 0}) == {
    "layers/attention/q_norm": False,
    "layers/attention/q": True,
  }


def test_clip_is_global_and_zero_turns_it_off():
  params = {"a": jnp.ones(4), "b": jnp.ones(5)}
  small = jax.tree.map(lambda x: 1e-3 * x, params)
  big = jax.tree.map(lambda x: 1e3 * x, params)
  clipped = make_optimizer(OptimizerConfig(clip_norm=3e-3))  # the global norm of `small`
  after = lambda optimizer, grads: optimizer.update(grads, optimizer.init(params), params)[1]
  for one, other in zip(jax.tree.leaves(after(clipped, big)), jax.tree.leaves(after(clipped, small)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4)
  unclipped = make_optimizer(OptimizerConfig(clip_norm=0.0))
  first_moment = jax.tree.leaves(after(unclipped, big))[1]
  np.testing.assert_allclose(first_moment, 0.1 * 1e3, rtol=1e-4)


def test_a_restored_state_follows_the_new_learning_rate():
  """No learning rate hides in the optimiser state."""
  params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 0.1)}
  old, new = (make_optimizer(OptimizerConfig(learning_rate=lr, weight_decay=0.0)) for lr in (1e-3, 1e-5))
  _, restored = old.update(grads, old.init(params), params)
  updates, _ = new.update(grads, restored, params)
  np.testing.assert_allclose(updates["w"], -1e-5, rtol=1e-3)


def test_trainable_leaves_are_all_but_the_named():
  params = algorithm_toy.value_params()
  leaves = trainable_leaves(params, algorithm_toy.FROZEN)
  # "attention" in the name is not enough to be frozen: the list is explicit
  assert leaves.keys() == {"embed", "layers/attention_norm", "value_head"}
  assert trainable_leaves(params).keys() == leaves.keys() | algorithm_toy.FROZEN


def test_replace_leaves_keeps_the_others():
  params = algorithm_toy.value_params()
  new = replace_leaves(params, {"layers/attention_norm": jnp.zeros(4)})
  assert not new["layers"]["attention_norm"].any()
  assert new["embed"] is params["embed"]
  assert jax.tree.structure(new) == jax.tree.structure(params)


@pytest.mark.parametrize("frozen", [{"layers/attention/k"}, {"attention"}, {"layers/attention"}, {"embed", "Embed"}])
def test_unknown_frozen_names_are_refused(frozen):
  with pytest.raises(ConfigError, match="frozen: .*no such parameters"):
    trainable_leaves(algorithm_toy.value_params(), frozenset(frozen))


def test_freezing_everything_is_refused():
  params = algorithm_toy.value_params()
  with pytest.raises(ConfigError, match="frozen"):
    trainable_leaves(params, frozenset(trainable_leaves(params)))
