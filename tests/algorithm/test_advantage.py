"""Skip-observation GAE, λ, terminal rewards and whitening: the paper's numbers, plain loops, and properties."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from toys import algorithm_toy

from sao_jax.algorithm import advantage, tokens

SKIP = 99.0  # stands on observations, must never be read


_gae = jax.jit(advantage.skip_observation_gae, static_argnames="gamma")
_place = jax.jit(advantage.place_terminal_reward)


def arrays(mask, values, reward, length=8):
  """Rewards, values and mask, padded with poison so that all cases share one compilation."""
  padding = length - len(mask)
  mask = np.array(list(mask) + [0] * padding, bool)
  return _place(reward, mask), np.array(list(values) + [SKIP] * padding, np.float32), mask


@pytest.mark.parametrize(
  ("mask", "values", "reward", "lam", "gamma", "expected"),
  [
    ([1, 1, 0, 0, 1], [0.5, 0.6, 9, 9, 0.7], 1, 7 / 9, 1, [0.359259, 0.333333, 0, 0, 0.3]),
    ([1, 1, 0, 0, 1], [0.5, 0.6, np.nan, np.inf, 0.7], 1, 7 / 9, 1, [0.359259, 0.333333, 0, 0, 0.3]),
    ([0, 1, 1, 0, 0, 1, 0], [7, 0.5, 0.6, 9, 9, 0.7, 5], 1, 7 / 9, 1, [0, 0.359259, 0.333333, 0, 0, 0.3, 0]),
    ([1, 1, 0, 0, 1], [0.5, 0.6, 9, 9, 0.7], 1, 1, 1, [0.5, 0.4, 0, 0, 0.3]),
    ([1, 0, 0, 1], [0, 0, 0, 0], 2, 0.5, 0.9, [0.9, 0, 0, 2]),
    ([1, 1, 1], [0.5, 0.25, 0.75], 1, 0.95, 1, [0.450625, 0.7375, 0.25]),
    ([1, 0, 0, 1, 1], [0.5, 9, -9, 0.25, 0.75], 1, 0.95, 1, [0.450625, 0, 0, 0.7375, 0.25]),
    ([1, 0, 0], [0.5, 0.8, 0.8], 1, 1 / 3, 1, [0.5, 0, 0]),
    ([0, 0, 1], [0.8, 0.8, 0.5], 1, 1 / 3, 1, [0, 0, 0.5]),
    ([1, 1, 1, 1], [0.5, 0.6, 0.7, 0.8], 1, 5 / 6, 1, [0.36852, 0.32222, 0.26667, 0.2]),
    ([1, 1, 1], [0.5, 0.25, 0.75], 1, 0, 0, [-0.5, -0.25, 0.25]),
    ([0, 0, 0], [1, 2, 3], 5, 0.5, 1, [0, 0, 0]),
  ],
)
def test_gae_numbers(mask, values, reward, lam, gamma, expected):
  got = _gae(*arrays(mask, values, reward), lam=lam, gamma=gamma)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, list(expected) + [0] * (8 - len(expected)), atol=5e-6)


def test_per_token_rewards_join_the_terminal_reward():
  rewards, values, mask = arrays([1, 1, 1, 0, 0], [0.5, -0.2, 0.3, 0.9, 0.9], 10)
  rewards = rewards + np.array([0.1, 0.2, 0.3, 7, 7, 7, 7, 7], np.float32)
  got = _gae(rewards, values, mask, lam=0.0, gamma=0)
  np.testing.assert_allclose(got, [-0.4, 0.4, 10, 0, 0, 0, 0, 0], atol=1e-6)


def test_neither_through_observations_nor_restarted_per_turn():
  """The two wrong recursions give the numbers on record, and ours gives neither."""
  rewards, values, mask = arrays([1, 1, 0, 0, 1], [0.5, 0.6, 9, 9, 0.7], 1)
  through, _ = algorithm_toy.gae_loop(rewards[:5], values[:5], np.ones(5), lam=7 / 9)
  np.testing.assert_allclose(through[:2], [2.838, 3.520], atol=1e-3)
  per_turn, _ = algorithm_toy.gae_loop(np.zeros(2), [0.5, 0.6], [1, 1], lam=7 / 9)
  np.testing.assert_allclose(per_turn, [-0.367, -0.6], atol=1e-3)
  got = _gae(rewards, values, mask, lam=7 / 9, gamma=1)
  assert abs(got[0] - through[0]) > 1
  assert abs(got[0] - per_turn[0]) > 0.5


@pytest.mark.parametrize(
  ("mask", "index"),
  [
    ([1, 0, 0, 1, 1], 4),
    ([1, 1, 0, 0, 1, 1, 0, 0], 5),
    ([1, 1, 0, 0, 1, 1, 0], 5),
    ([0, 1, 0], 1),
    ([1], 0),
    ([0, 0, 0], None),
  ],
)
def test_reward_sits_on_the_last_sampled_token(mask, index):
  expected = np.zeros(len(mask), np.float32)
  if index is not None:
    expected[index] = 0.5
  got = arrays(mask, mask, 0.5)[0]
  np.testing.assert_array_equal(got[: len(mask)], expected)
  assert not got[len(mask) :].any()


def test_integer_inputs_do_not_truncate():
  """Integer rewards, values and masks are promoted: 0.5 stays 0.5."""
  rewards, values, mask = np.array([0, 1]), np.array([0, 0]), np.array([1, 1])
  gae, place = inspect.unwrap(advantage.skip_observation_gae), inspect.unwrap(advantage.place_terminal_reward)
  np.testing.assert_allclose(gae(rewards, values, mask, lam=0.5), [0.5, 1.0])
  np.testing.assert_array_equal(place(0.5, mask), [0.0, 0.5])


@pytest.mark.parametrize(
  ("n", "expected"), [(1, 0.3333), (3, 7 / 9), (4, 0.8333), (10, 0.9333), (100, 0.99333), (30000, 0.9999778)]
)
def test_length_adaptive_lambda(n, expected):
  lam = advantage.length_adaptive_lambda(n)
  assert lam.dtype == jnp.float32
  np.testing.assert_allclose(lam, expected, atol=5e-5 if n <= 10 else 5e-6 if n == 100 else 5e-8)
  np.testing.assert_allclose(advantage.one_minus_lambda(n), 1 / (1.5 * n), rtol=1e-7)


def test_long_trajectory_keeps_the_digits_of_one_minus_lambda():
  """n = 30000: half of the reward reaches the first token, and λ rounded to fp32 would miss it by 3e-4 of it.

  λ^n tends to exp(-1/1.5) = 0.5134; a cap of λ at 0.999 would leave 0.999^30000 = 9e-14.
  """
  n = 30000
  mask, segments = np.ones(n, bool), np.ones(n, np.int32)
  rewards = np.zeros(n, np.float32)
  rewards[-1] = 1.0
  gae = jax.jit(algorithm_toy.packed_advantages)
  exact = np.full(n, advantage.one_minus_lambda(n))
  first = gae(rewards, np.zeros(n, np.float32), mask, segments, one_minus_lam=exact)[0]
  np.testing.assert_allclose(first, (1 - 1 / (1.5 * n)) ** (n - 1), rtol=2e-6)
  np.testing.assert_allclose(first, 0.5134, atol=1e-4)

  values = np.random.default_rng(0).uniform(0, 1, n).astype(np.float32)
  expected, _ = algorithm_toy.gae_loop(rewards, values, mask, lam=1 - 1 / (1.5 * n))
  np.testing.assert_allclose(gae(rewards, values, mask, segments, one_minus_lam=exact), expected, atol=2e-6)


@pytest.mark.parametrize(
  ("bootstrap", "expected", "target"), [(0.5, [0.3, 0.1, -0.1], 0.5), (0.0, [-0.2, -0.4, -0.6], 0.0)]
)
def test_truncation(bootstrap, expected, target):
  rewards, padded, padded_mask = arrays([1, 1, 1], [0.2, 0.4, 0.6], 0.0)
  got = _gae(rewards, padded, padded_mask, lam=1.0, gamma=1, bootstrap_value=bootstrap)
  np.testing.assert_allclose(got[:3], expected, atol=1e-6)
  values, mask, zeros = padded[:3], padded_mask[:3], np.zeros(3, np.float32)
  targets = advantage.packed_returns(
    zeros,
    values,
    mask,
    np.ones(3, np.int32),
    one_minus_lam=zeros,
    bootstrap_values=np.full(3, bootstrap, np.float32),
  )
  np.testing.assert_allclose(targets, [target] * 3, atol=1e-6)


def test_critic_targets_are_exactly_the_reward():
  """λ = γ = 1: exactly R, whatever the values; targets from the policy's λ would be others."""
  values, mask, segments = np.array([0.5, 0.6, 0.7, 0.8], np.float32), np.ones(4, bool), np.ones(4, np.int32)
  rewards = advantage.place_terminal_reward(1.0, mask)
  targets = functools.partial(advantage.packed_returns, rewards, values, mask, segments)
  np.testing.assert_array_equal(targets(one_minus_lam=np.zeros(4, np.float32)), [1, 1, 1, 1])
  coupled = targets(one_minus_lam=np.full(4, 1 / 6, np.float32))
  np.testing.assert_allclose(coupled, [0.8685, 0.9222, 0.9667, 1], atol=5e-5)


def test_shapes_that_would_broadcast_are_refused():
  """λ of shape [T, 1] must not silently become [T, T]."""
  x, mask, ones = jnp.zeros(3), jnp.ones(3, bool), jnp.ones(3, jnp.int32)
  # As in a run, where no type checker is around them.
  packed_returns, gae = map(inspect.unwrap, (advantage.packed_returns, advantage.skip_observation_gae))
  with pytest.raises(AssertionError):
    packed_returns(x, x, mask, ones, one_minus_lam=jnp.zeros((3, 1)))
  with pytest.raises(AssertionError):
    gae(x, x[:2], mask, lam=0.5)
  with pytest.raises((ValueError, TypeError)):
    gae(x, x, mask, lam=jnp.full((3, 1), 0.5))


LENGTH = 24  # of the rows of all properties, so that each compiles once


@jax.jit
def packed(rewards, values, mask, segments, one_minus_lam, bootstrap):
  """Advantages and targets of one packed row."""
  keywords = {"one_minus_lam": one_minus_lam, "gamma": 0.97, "bootstrap_values": bootstrap}
  return (
    algorithm_toy.packed_advantages(rewards, values, mask, segments, **keywords),
    advantage.packed_returns(rewards, values, mask, segments, **keywords),
    algorithm_toy.packed_advantages(rewards, values, mask, segments, one_minus_lam=one_minus_lam),
  )


trajectory = st.tuples(
  st.lists(st.booleans(), min_size=1, max_size=8),
  st.integers(0, 2**16),
  st.floats(0.0, 1.0, width=32),
  st.floats(-1.0, 1.0, width=32),
)


def lay_out(trajectories, start=0):
  """Packs (mask, seed, λ, bootstrap) trajectories; what stands on unsampled tokens is poison."""
  row = {
    "rewards": np.full(LENGTH, SKIP, np.float32),
    "values": np.full(LENGTH, np.nan, np.float32),
    "mask": np.zeros(LENGTH, bool),
    "segments": np.zeros(LENGTH, np.int32),
    "one_minus_lam": np.full(LENGTH, 0.5, np.float32),
    "bootstrap": np.full(LENGTH, SKIP, np.float32),
  }
  slices, t = [], start
  for segment, (mask, seed, lam, bootstrap) in enumerate(trajectories, 1):
    rng = np.random.default_rng(seed)
    where = slice(t, t + len(mask))
    row["mask"][where] = mask
    draws = rng.uniform(-1, 1, (2, len(mask)))
    row["rewards"][where] = np.where(mask, draws[0], SKIP)
    row["values"][where] = np.where(mask, draws[1], np.nan)
    row["segments"][where] = segment
    row["one_minus_lam"][where] = 1.0 - lam
    row["bootstrap"][where] = bootstrap
    slices.append(where)
    t += len(mask)
  return row, slices


@hypothesis.given(st.lists(trajectory, min_size=1, max_size=3))
def test_packed_rows_equal_the_plain_loop(trajectories):
  row, slices = lay_out(trajectories)
  advantages, returns, _ = packed(**row)
  for where, (mask, _, lam, bootstrap) in zip(slices, trajectories, strict=True):
    expected = algorithm_toy.gae_loop(
      row["rewards"][where], row["values"][where], mask, lam=lam, gamma=0.97, bootstrap=bootstrap
    )
    np.testing.assert_allclose(advantages[where], expected[0], atol=3e-6)
    np.testing.assert_allclose(returns[where], expected[1], atol=3e-6)
  assert not advantages[~row["mask"]].any()
  assert not returns[~row["mask"]].any()


@hypothesis.given(st.lists(trajectory, min_size=1, max_size=2), st.integers(0, 8))
def test_padding_and_packing_order_change_nothing(trajectories, padding):
  row, slices = lay_out(trajectories)
  moved, moved_slices = lay_out(trajectories[::-1], start=padding)
  for here, there in zip(slices, moved_slices[::-1], strict=True):
    for a, b in zip(packed(**row), packed(**moved), strict=True):
      np.testing.assert_allclose(a[here], b[there], atol=1e-6)


@hypothesis.given(
  st.integers(1, LENGTH), st.integers(0, 2**16), st.floats(0.0, 1.0, width=32), st.floats(-2, 2, width=32)
)
def test_closed_form(n, seed, lam, reward):
  """A_k = λ^(n-1-k) R - V_k + (1-λ) Σ_{j>k} λ^(j-k-1) V_j, for γ = 1 and a terminal reward."""
  row, _ = lay_out([([True] * n, seed, lam, 0.0)])
  row["rewards"][:n] = 0.0
  row["rewards"][n - 1] = reward
  values = row["values"][:n].astype(np.float64)
  expected = [
    lam ** (n - 1 - k) * reward - values[k] + (1 - lam) * sum(lam ** (j - k - 1) * values[j] for j in range(k + 1, n))
    for k in range(n)
  ]
  np.testing.assert_allclose(packed(**row)[2][:n], expected, atol=3e-6)


@jax.jit
def scan_whole_and_in_two(complements, offsets):
  """A reverse scan at once, and of two shards that exchange nothing but the first value of the right one."""
  cut = 10
  right = tokens.affine_scan(complements[cut:], offsets[cut:], reverse=True)
  u, d = jax.lax.associative_scan(tokens.compose, (complements[:cut], offsets[:cut]), reverse=True)
  return tokens.affine_scan(complements, offsets, reverse=True), jnp.concatenate([d + (1 - u) * right[0], right])


@hypothesis.given(st.lists(trajectory, min_size=1, max_size=3))
def test_scan_composes_across_a_cut(trajectories):
  row, _ = lay_out(trajectories)
  offsets = np.where(row["mask"], row["rewards"], 0.0).astype(np.float32)
  complements = np.where(row["mask"], row["one_minus_lam"], 0.0).astype(np.float32)
  np.testing.assert_allclose(*scan_whole_and_in_two(complements, offsets), atol=1e-5)


@pytest.mark.parametrize(
  ("x", "mask", "expected"),
  [
    ([1, 2, 3, 100], [1, 1, 1, 0], [-1.2247, 0, 1.2247, 0]),
    ([1, 2, 3, np.nan], [1, 1, 1, 0], [-1.2247, 0, 1.2247, 0]),
    ([1e-4, 2e-4, 3e-4, 5], [1, 1, 1, 0], [-0.7746, 0, 0.7746, 0]),  # 1e-4 / sqrt(1e-8 · 2/3 + 1e-8)
    ([1e-20, 2e-20, 3e-20, 5], [1, 1, 1, 0], [0, 0, 0, 0]),
    ([1e30, 2e30, 3e30, 0], [1, 1, 1, 0], [-1.2247, 0, 1.2247, 0]),
    ([5, 7, 7], [1, 0, 0], [0, 0, 0]),
    ([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [1] * 7, [0] * 7),
    ([0.7, 0.7, 0.7], [1, 1, 1], [0, 0, 0]),
    ([0, 0, 0], [1, 1, 1], [0, 0, 0]),
    ([5, 7], [0, 0], [0, 0]),
    ([[1, 9], [2, 3]], [[1, 0], [1, 1]], [[-1.2247, 0], [0, 1.2247]]),
  ],
)
def test_whitening(x, mask, expected):
  got = advantage.masked_whiten(np.array(x, np.float32), np.array(mask, bool))
  np.testing.assert_allclose(got, expected, atol=5e-5)


@pytest.mark.parametrize("count", [2, 3, 1000, 100_000])
@pytest.mark.parametrize("value", [0.1, -0.3, 1e-3, 123.456])
def test_whitening_constants_of_any_number_gives_zero(value, count):
  x = jnp.full(count, value, jnp.float32)
  np.testing.assert_array_equal(advantage.masked_whiten(x, jnp.ones(count, bool)), 0.0)


@hypothesis.given(st.integers(0, 2**16), st.sampled_from([0.0, 1.0, -3.7]))
def test_equal_returns_leave_advantages_as_they_are(seed, reward):
  """Whatever their spread: nothing is blown up, and no failure is reinforced for being below the mean."""
  rng = np.random.default_rng(seed)
  batch = algorithm_toy.pack([[dataclasses.replace(t, reward=reward)] for t in algorithm_toy.TOYS], 32)
  trained = batch.action_mask & jnp.asarray(rng.random(batch.action_mask.shape) < 0.8)
  raw = jnp.asarray(rng.normal(reward, 10.0 ** rng.integers(-5, 2), trained.shape), jnp.float32)
  got = advantage.whiten_advantages(raw, batch, trained)
  np.testing.assert_array_equal(got, jnp.where(trained, raw, 0.0))


def test_advantages_are_whitened_over_the_trained_tokens():
  """The returns and advantages of other tokens do not matter."""
  toys = [dataclasses.replace(t, reward=float(i == 0)) for i, t in enumerate(algorithm_toy.TOYS)]
  batch = algorithm_toy.pack([[t] for t in toys], 32)
  advantages = jnp.asarray(np.random.default_rng(1).normal(size=batch.token_ids.shape), jnp.float32)
  trained = batch.action_mask & (jnp.arange(32) % 3 > 0)[None]
  chosen = np.asarray(advantages)[np.asarray(trained)]
  got = advantage.whiten_advantages(jnp.where(trained, advantages, 1e3), batch, trained)
  np.testing.assert_allclose(got[trained], (chosen - chosen.mean()) / chosen.std(), rtol=1e-4, atol=1e-5)
  assert not got[~trained].any()

  failures = trained.at[0].set(False)  # the one success is not trained
  got = advantage.whiten_advantages(advantages, batch, failures)
  np.testing.assert_array_equal(got, jnp.where(failures, advantages, 0.0))
