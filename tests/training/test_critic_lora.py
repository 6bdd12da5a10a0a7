"""Critic-only steps with LoRA: they learn, and hold optimiser state for factors and head alone."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from toys import training_toy
from toys.trajectories import make_trajectories

from sao_jax.config import CriticConfig, LoRAConfig
from sao_jax.learner import setup
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.lora_start import fresh_critic
from sao_jax.training.heldout_critic import heldout_variance, make_reader


def config_of():
  """A dense model, in which factors of rank 2 are few; gradients add up over two micro-batches."""
  config = training_toy.replace(
    training_toy.get_config(),
    model={"num_experts": 0, "d_ff": 64, "lora": LoRAConfig(rank=1), "param_dtype": "bfloat16"},
    algorithm={"micro_batches": 2},
    critic_optimizer={"learning_rate": 2e-2},
    rollout={"row_counts": (16,)},
  )
  return dataclasses.replace(config, critic=CriticConfig(LoRAConfig(rank=2)))


def told_apart(first):
  """Trajectories whose return their sampled tokens tell, half of all."""
  for each in make_trajectories()[first::2]:
    yield dataclasses.replace(each, token_ids=np.where(each.action_mask, 30 + int(each.reward), each.token_ids))


def test_it_learns_the_value_on_a_base_that_stays_bit_for_bit():
  """Value pretraining's step and its measure, on trajectories that are held out."""
  config = config_of()
  learner = setup.make_learner(config, tuple(jax.devices()[:1]), freeze=False)
  policy = setup.init_policy_params(learner, seed=0)
  state = setup.make_state(learner, policy, fresh_critic(learner, policy, 0))
  before, policy = jax.device_get((state, policy))

  # fp32 factors, and a head in two bytes with its master: 12 and 14 bytes of each of them, and two counters.
  count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  factors = count(before.critic.params["lora"]) - 1
  assert count(before.critic.params) == factors + 1 + 16
  held = sum(leaf.nbytes for leaf in jax.tree.leaves(before.critic.opt_state))
  assert held <= 8 * factors + 12 * 16 + 3 * 4 and factors < count(before.policy.params) / 3

  step, read = setup.make_step(learner, update_policy=False), make_reader(learner)
  batch, heldout = packed_batch(learner, list(told_apart(0))).rows, list(told_apart(1))

  def explained(state):
    return heldout_variance(learner, read, learner.critic.whole(state.critic.params, state.policy.params), heldout)

  at_first = explained(state)
  for _ in range(30):
    state, metrics = step(state, batch)
  after = jax.device_get(state)
  assert at_first == 0.0 and explained(state) > 0.5 and metrics["explained_variance"] > 0.8
  jax.tree.map(np.testing.assert_array_equal, after.policy, before.policy)
  jax.tree.map(np.testing.assert_array_equal, after.policy.params, policy)
  moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), after.critic.params, before.critic.params)
  assert moved["lora"].pop("scale") is False and all(jax.tree.leaves(moved))
  assert int(after.critic.step) == 30 * config.algorithm.value_updates
