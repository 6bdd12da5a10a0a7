"""The train step against plain loops, its invariances and its metrics, on toy networks."""

from __future__ import annotations

import dataclasses
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from toys import algorithm_toy as toy
from toys.algorithm_toy import (
  CONFIG,
  PAIRS,
  SINGLE,
  SPREAD,
  TOYS,
  assert_same,
  assert_same_metrics,
  leaves_of,
  make_toys,
  run,
)

from sao_jax.algorithm.network import replace_leaves, trainable_leaves
from sao_jax.config import AlgorithmConfig
from sao_jax.types import TrainState


def reference_step(config: AlgorithmConfig, state: TrainState, toys: list[toy.Toy]):
  """The step by plain loops over trajectories, one per row, with nothing shared but the losses' definitions."""
  batch = toy.pack([[t] for t in toys], 32)
  masks = [np.flatnonzero(t.action_mask) for t in toys]
  n_tokens = sum(len(m) for m in masks)

  def critic_loss(leaves, params):
    outputs = toy.value_apply(replace_leaves(params, leaves), batch)
    total = 0.0
    for row, (t, sampled) in enumerate(zip(toys, masks, strict=True)):
      total += jnp.sum((outputs[row, sampled - 1, 0] - t.reward) ** 2)
    return total / n_tokens

  values, losses, critic = [], [], state.critic
  params, opt_state = critic.params, critic.opt_state
  for _ in range(config.value_updates):
    leaves = trainable_leaves(params, toy.FROZEN)
    values.append(np.asarray(toy.value_apply(params, batch))[..., 0])
    loss, grads = jax.value_and_grad(critic_loss)(leaves, params)
    losses.append(loss)
    updates, opt_state = toy.VALUE_OPTIMIZER.update(grads, opt_state, leaves)
    params = replace_leaves(params, optax.apply_updates(leaves, updates))
  values.append(np.asarray(toy.value_apply(params, batch))[..., 0])
  value_params = params

  advantages = []
  for row, (t, sampled) in enumerate(zip(toys, masks, strict=True)):
    rewards = np.zeros(len(t.action_mask))
    rewards[sampled[-1]] = t.reward
    before = np.concatenate([[0.0], values[-1 if config.advantage_values == "post" else 0][row, : len(rewards) - 1]])
    lam = 1 - 1 / (config.alpha * len(sampled))
    advantages.append(toy.gae_loop(rewards, before, t.action_mask, lam=lam)[0][sampled])
  flat = np.concatenate(advantages)
  if config.whitens() and len({t.reward for t in toys}) > 1:
    advantages = [(a - flat.mean()) / np.sqrt(flat.var() + 1e-8) for a in advantages]

  fixed_logprobs = np.asarray(toy.policy_apply(state.policy.params, batch).logprobs)

  def policy_loss(params):
    logprobs = toy.policy_apply(params, batch).logprobs
    total, rejected = 0.0, 0
    for row, (t, sampled) in enumerate(zip(toys, masks, strict=True)):
      ratios = np.exp(fixed_logprobs[row, sampled] - t.behavior_logprobs[sampled])
      kept = (ratios > 1 - config.epsilon_low) & (ratios < 1 + config.epsilon_high)
      total -= jnp.sum(np.where(kept, ratios, 0) * advantages[row] * logprobs[row, sampled])
      rejected += (~kept).sum()
    return total / n_tokens, rejected

  leaves = trainable_leaves(state.policy.params)
  (loss, rejected), grads = jax.value_and_grad(policy_loss, has_aux=True)(state.policy.params)
  grads = trainable_leaves(grads)
  updates, _ = toy.POLICY_OPTIMIZER.update(grads, state.policy.opt_state, leaves)
  policy_params = replace_leaves(state.policy.params, optax.apply_updates(leaves, updates))
  return policy_params, value_params, losses, loss, rejected / n_tokens, flat


@pytest.mark.parametrize("config", [CONFIG, SINGLE])
def test_step_equals_plain_loops(config):
  policy, critic, losses, loss, rejected, advantages = reference_step(config, toy.train_state(), TOYS[:4])
  state, metrics = run(config, SPREAD[:4] + [[]] * 4)
  for ours, theirs in ((state.policy.params, policy), (state.critic.params, critic)):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, theirs)
  np.testing.assert_allclose(metrics["value_loss_first"], losses[0], rtol=1e-5)
  np.testing.assert_allclose(metrics["value_loss_last"], losses[-1], rtol=1e-5)
  np.testing.assert_allclose(metrics["policy_loss"], loss, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(metrics["rejected_low"] + metrics["rejected_high"], rejected, rtol=1e-6)
  np.testing.assert_allclose(metrics["advantage_mean"], advantages.mean(), rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(metrics["advantage_std"], advantages.std(), rtol=1e-4)
  assert state.policy_version == 3
  assert state.policy.step == 1
  assert state.critic.step == config.value_updates


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_returns_make_an_update_of_raw_size(reward):
  """Whitened, the critic's errors alone would move the policy at full size."""
  toys = [dataclasses.replace(t, reward=reward) for t in TOYS[:4]]
  policy, _, _, loss, _, _ = reference_step(CONFIG, toy.train_state(), toys)
  state, metrics = run(CONFIG, [[t] for t in toys] + [[]] * 4)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), state.policy.params, policy)
  np.testing.assert_allclose(metrics["policy_loss"], loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_change_nothing(micro_batches):
  one = run()
  many = run(dataclasses.replace(CONFIG, micro_batches=micro_batches))
  assert_same(one[0], many[0])
  assert_same_metrics(one[1], many[1])


@pytest.mark.parametrize(
  "rows",
  [
    SPREAD[::-1],
    [*PAIRS, [], [], [], []],
    [[], *PAIRS[::-1], [], [], []],
    [TOYS[:3], [], TOYS[3:6], [], [], [TOYS[7], TOYS[6]], [], []],
  ],
)
def test_packing_and_order_change_nothing(rows):
  base, packed = run(), run(rows=rows, length=32)
  assert_same(base[0], packed[0])
  assert_same_metrics(base[1], packed[1])


@hypothesis.given(st.integers(0, 2**16), st.lists(st.integers(0, 7), min_size=8, max_size=8))
def test_any_packing_trains_the_same(seed, rows_of):
  """Eight random trajectories, spread over eight rows or thrown into any of them."""
  toys = make_toys(seed=seed)
  rows = [[] for _ in range(8)]
  for t, row in zip(toys, rows_of, strict=True):
    rows[row if len(rows[row]) < 2 else min(range(8), key=lambda i: len(rows[i]))].append(t)
  base, packed = run(rows=[[t] for t in toys]), run(rows=rows)
  for name in ("num_sampled_tokens", "value_loss_last", "policy_loss", "policy_grad_norm", "explained_variance"):
    np.testing.assert_allclose(packed[1][name], base[1][name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_data_parallel_width_changes_nothing():
  """Rows sharded over devices, in micro-batches. Only sums cross devices: no row moves, nothing is gathered."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
  batch = jax.device_put(toy.pack(SPREAD, 32), NamedSharding(mesh, PartitionSpec("data")))
  state = jax.device_put(toy.train_state(), NamedSharding(mesh, PartitionSpec()))
  config = dataclasses.replace(CONFIG, micro_batches=2)
  program = toy.train_step(config).lower(state, batch).compile().as_text()
  assert not re.findall(r"(?:all-gather|all-to-all|collective-permute)[-\w]*\(", program)
  sharded, base = run(config, batch, state=state), run()
  assert_same(base[0], sharded[0])
  assert_same_metrics(base[1], sharded[1])


def test_sharded_sequences_and_parameters_change_nothing():
  """Tokens of a row and columns of the parameters over devices; the state keeps the shardings it is told to keep."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "context"))
  batch = jax.device_put(toy.pack(SPREAD, 32), NamedSharding(mesh, PartitionSpec("fsdp", "context")))
  columns = lambda leaf: (
    PartitionSpec(*[None] * (leaf.ndim - 1), "fsdp") if leaf.shape[-1:] == (4,) else PartitionSpec()
  )
  shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, columns(leaf)), toy.train_state())
  step = toy.train_step.__wrapped__(CONFIG, state_shardings=shardings)
  state, metrics = step(jax.device_put(toy.train_state(), shardings), batch)
  base = run()
  assert_same(base[0], state)
  assert_same_metrics(base[1], metrics)
  assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
  assert all(value.sharding.is_fully_replicated for value in metrics.values())


def test_padding_id_may_be_sampled():
  """Token id 0 is also the padding id: a sampled 0 is trained, a padded one is not."""
  toys = [dataclasses.replace(t, token_ids=t.token_ids * 0) for t in TOYS]
  _, metrics = run(rows=[[t] for t in toys])
  assert metrics["num_sampled_tokens"] == sum(t.action_mask.sum() for t in toys)
  assert metrics["policy_grad_norm"] > 0


def test_first_token_of_a_segment_is_never_trained():
  """It has neither a log-probability nor a value, in the row's first segment and behind another."""
  toys = [toy.random_toy(np.random.default_rng(i), mask=[1, 1, 1]) for i in range(2)]
  batch = toy.pack([toys] + [[]] * 7, 32)
  assert batch.action_mask.sum() == 6
  _, metrics = run(rows=batch)
  assert metrics["num_sampled_tokens"] == 4


def test_metrics_of_a_batch():
  rng = np.random.default_rng(3)
  toys = [
    toy.random_toy(rng, mask=[0, 1, 1, 0, 1], reward=1.0, versions=np.array([-1, 2, 1, -1, 0])),
    toy.random_toy(rng, mask=[0, 1], reward=0.5, versions=np.array([-1, 3]), truncated=True),
    toy.random_toy(rng, mask=[0, 0, 0], reward=0.25),
  ]
  _, metrics = run(rows=[toys] + [[]] * 7)
  assert metrics["num_tokens"] == 10
  assert metrics["num_sampled_tokens"] == 4
  assert metrics["num_trajectories"] == 3
  assert metrics["num_truncated"] == 1
  assert metrics["num_untrained"] == 1  # all-zero mask: no reward placed, and counted
  np.testing.assert_allclose(metrics["reward_mean"], (1.0 + 0.5 + 0.0) / 3)
  np.testing.assert_array_equal(metrics["lag_histogram"], [1, 1, 1, *[0] * 13])
  assert metrics["lag_negative"] == 1  # version 3 at version 2: shown, not clamped
  batch = toy.pack([toys], 32)
  outputs = toy.policy_apply(toy.policy_params(), batch)
  delta = np.abs(outputs.logprobs - batch.behavior_logprobs)[0]
  np.testing.assert_allclose(metrics["delta_logprob"], np.mean(delta[[1, 2, 4, 6]]), rtol=1e-5)
  np.testing.assert_allclose(metrics["delta_logprob_by_lag"], [delta[1], delta[2], delta[4], *[np.nan] * 13], rtol=1e-5)
  np.testing.assert_allclose(metrics["entropy"], np.mean(outputs.entropy[0, [1, 2, 4, 6]]), rtol=1e-5)
  assert all(x.dtype == jnp.float32 for x in metrics.values())


def test_lag_zero_with_the_same_weights_rejects_nothing():
  batch = toy.pack(SPREAD, 32)
  logprobs = toy.policy_apply(toy.policy_params(), batch).logprobs
  batch = batch.replace(behavior_logprobs=jnp.where(batch.action_mask, logprobs, jnp.nan))
  _, metrics = run(rows=batch)
  assert metrics["rejected_low"] == metrics["rejected_high"] == 0
  np.testing.assert_allclose(metrics["effective_sample_size"], 1, atol=1e-5)
  np.testing.assert_allclose([metrics["ratio_p01"], metrics["ratio_p99"]], 1, atol=1e-5)
  assert metrics["delta_logprob"] < 1e-6


def test_frozen_leaves_stay_bit_identical_without_optimiser_state():
  state = toy.train_state()
  before = leaves_of(state)
  moments = [name for name in before if "opt_state" in name and "critic" in name]
  assert any("layers/attention_norm" in name for name in moments)
  assert not any(frozen in name for name in moments for frozen in toy.FROZEN)
  for _ in range(5):
    state, _ = run(state=state)
  after = leaves_of(state)
  for name, value in before.items():
    if name.startswith(".critic.params"):
      frozen = "'attention'" in name
      assert np.array_equal(value, after[name]) == frozen, name
