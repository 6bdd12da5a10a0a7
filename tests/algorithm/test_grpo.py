"""Group-relative advantages (M9): golden numbers, and packed batches against a plain loop over groups."""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from toys import algorithm_toy as toy

from sao_jax.algorithm.grpo import group_advantages, grpo_advantages
from sao_jax.algorithm.train_step import init_train_state, make_train_step
from sao_jax.errors import ConfigError

GRPO = dataclasses.replace(toy.CONFIG, advantage="grpo", whiten_advantages=False)
_group_advantages = jax.jit(group_advantages)


@pytest.mark.parametrize(
  "groups, expected",
  [
    ([[1, 3]], [[-0.7071, 0.7071]]),
    ([[1.0, 3.0], [0.0, 1.0]], [[-0.7071, 0.7071], [-0.7071, 0.7071]]),
    ([[0.0, 0.0, 1.0]], [[-0.57735, -0.57735, 1.154701]]),
    ([[0.5, 0.5, 0.5]], [[0.0, 0.0, 0.0]]),
    ([[0.1, 0.1, 0.1], [2.0]], [[0.0, 0.0, 0.0], [0.0]]),  # a group of one is compared with nobody
    ([[1000.1] * 3], [[0.0] * 3]),
  ],
)
def test_groups_are_standardised_with_the_sample_deviation(groups, expected):
  rewards = np.concatenate(groups).astype(np.float32)
  ids = np.concatenate([[i + 1] * len(group) for i, group in enumerate(groups)]).astype(np.int32)
  got = group_advantages(jnp.asarray(rewards), jnp.asarray(ids), jnp.ones(len(ids), bool))
  np.testing.assert_allclose(got, np.concatenate(expected), atol=1e-4)


@hypothesis.given(
  st.integers(1, 200),
  st.floats(-(2.0**99), 2.0**99, width=32),
  st.integers(0, 2),
  st.sampled_from(["float32", "bfloat16"]),
)
def test_equal_rewards_are_no_advantage_at_all(size, reward, ulps, dtype):
  """Exactly, and up to the rounding of the rewards: 63 × 1000.3 has a mean that is none of them."""
  ids, rewards = np.arange(256) % 2, np.full(256, reward, np.float32)
  members = np.arange(256) < size
  if dtype == "float32" and abs(reward) > 1e-30:
    rewards[::5] *= np.float32(1 + 1.2e-7 * ulps)
  rewards[~members] = np.nan
  assert not _group_advantages(jnp.asarray(rewards, dtype), ids, members).any()


def test_a_difference_of_rewards_is_an_advantage_even_beside_large_ones():
  rewards, ids = jnp.array([1000.3, 1000.2, 0.0, 1e-3], jnp.float32), jnp.array([1, 1, 2, 2])
  got = group_advantages(rewards, ids, jnp.ones(4, bool))
  np.testing.assert_allclose(got, [0.7071, -0.7071, -0.7061, 0.7061], atol=1e-4)


def test_entries_that_are_no_members_change_nothing():
  rewards = jnp.array([1.0, jnp.nan, 3.0, 7.0], jnp.float32)
  got = group_advantages(rewards, jnp.array([1, 1, 1, 2]), jnp.array([True, False, True, False]))
  np.testing.assert_allclose(got, [-0.7071, 0, 0.7071, 0], atol=1e-4)

  # Nor do they set the scale that rounding is measured by: these rewards are small, and differ.
  small = jnp.array([1e-7, 1e9, 3e-7], jnp.float32)
  got = group_advantages(small, jnp.ones(3, jnp.int32), jnp.array([True, False, True]))
  assert got[0] < 0 < got[2]


def test_a_batch_without_groups_is_refused():
  with pytest.raises(ConfigError, match=r"(?s)rollout.group_size.*no groups.*remedy"):
    grpo_advantages(GRPO, toy.pack(toy.SPREAD, 32))


def grouped_rows(toys, groups, rows_of, length=64):
  """The toys packed into the rows that they are given, with the group of each."""
  rows = [[i for i in range(len(toys)) if rows_of[i] == row] for row in range(8)]
  batch = toy.pack([[toys[i] for i in row] for row in rows], length)
  ids = np.zeros(batch.token_ids.shape, np.int32)
  for row, members in enumerate(rows):
    start = 0
    for i in members:
      ids[row, start : start + len(toys[i].token_ids)] = groups[i]
      start += len(toys[i].token_ids)
  return batch.replace(group_ids=jnp.asarray(ids)), rows


_grpo = jax.jit(lambda batch: grpo_advantages(GRPO, batch))


@hypothesis.given(
  st.integers(0, 2**16),
  st.lists(st.integers(1, 3), min_size=8, max_size=8),
  st.lists(st.integers(0, 7), min_size=8, max_size=8),
)
def test_packed_groups_equal_a_plain_loop(seed, groups, rows_of):
  """Members of a group may lie in any rows; observations and padding get nothing."""
  rng = np.random.default_rng(seed)
  toys = [dataclasses.replace(t, reward=float(rng.choice([0.0, 0.3, 1.0]))) for t in toy.make_toys(seed=seed)]
  rows_of = [row if rows_of[:i].count(row) < 3 else i for i, row in enumerate(rows_of)]
  batch, rows = grouped_rows(toys, groups, rows_of, length=128)
  got = np.asarray(_grpo(batch))

  expected = np.zeros(got.shape)
  for row, members in enumerate(rows):
    start = 0
    for i in members:
      rewards = [toys[j].reward for j in range(8) if groups[j] == groups[i]]
      spread = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
      advantage = (toys[i].reward - np.mean(rewards)) / (spread + 1e-6)
      mask = toys[i].action_mask.copy()
      mask[0] = False
      expected[row, start : start + len(mask)] = advantage * mask
      start += len(mask)
  np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_step_without_a_critic_is_the_policy_step_on_these_advantages():
  """The state has no critic, the metrics no figure of one; the update is DIS with the group's advantages."""
  toys, groups = toy.TOYS, [1, 1, 2, 2, 3, 3, 4, 4]
  batch, rows = grouped_rows(toys, groups, list(range(8)), length=32)
  before = toy.policy_params()
  step = make_train_step(GRPO, toy.POLICY, None, max_lag=3)
  state, metrics = step(init_train_state(toy.POLICY, None, toy.policy_params(), None), batch)
  assert state.critic is None and state.policy_version == 1
  assert not [name for name in metrics if name.startswith(("value_", "critic_", "explained"))]
  assert metrics["policy_updates_skipped"] == 0 and metrics["policy_grad_norm"] > 0

  advantages = np.asarray(grpo_advantages(GRPO, batch))
  fixed = np.asarray(toy.policy_apply(before, batch).logprobs)

  def loss(params):
    logprobs, total, count = toy.policy_apply(params, batch).logprobs, 0.0, 0
    for row, t in enumerate(toys):
      sampled = np.flatnonzero(t.action_mask)
      ratios = np.exp(fixed[row, sampled] - t.behavior_logprobs[sampled])
      kept = (ratios > 1 - GRPO.epsilon_low) & (ratios < 1 + GRPO.epsilon_high)
      total -= jnp.sum(np.where(kept, ratios, 0) * advantages[row, sampled] * logprobs[row, sampled])
      count += len(sampled)
    return total / count

  expected, grads = jax.value_and_grad(loss)(before)
  np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-4, atol=1e-6)
  norm = np.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))
  np.testing.assert_allclose(metrics["policy_grad_norm"], norm, rtol=1e-4)
