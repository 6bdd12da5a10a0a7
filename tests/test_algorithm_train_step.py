"""The train step against plain loops, its invariances, its guards and its modes, on toy networks."""

from __future__ import annotations

import dataclasses

import algorithm_toy as toy
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sao_jax.algorithm.frozen import replace_leaves, trainable_leaves
from sao_jax.config import AlgorithmConfig
from sao_jax.errors import ConfigError
from sao_jax.types import TrainState

# Every distinct config compiles for seconds: the tests share these.
CONFIG = AlgorithmConfig(epsilon_low=0.8, epsilon_high=5.0)
SINGLE = dataclasses.replace(CONFIG, advantage_values="pre", value_updates=1, whiten_advantages=False)


def make_toys(count=8, seed=0, **changes):
  rng = np.random.default_rng(seed)
  return [toy.random_toy(rng, **changes) for _ in range(count)]


TOYS = make_toys()
SPREAD = [[t] for t in TOYS]  # one trajectory per row
PAIRS = [[TOYS[i], TOYS[7 - i]] for i in range(4)]


def run(config=CONFIG, rows=SPREAD, length=32, state=None, **options):
  batch = rows if not isinstance(rows, list) else toy.pack(rows, length)
  return toy.train_step(config, **options)(state or toy.train_state(), batch)


def leaves_of(state: TrainState) -> dict[str, np.ndarray]:
  """Every array of the state, by path."""
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def assert_same(state, other, exact=False, only=""):
  ours, theirs = leaves_of(state), leaves_of(other)
  assert ours.keys() == theirs.keys()
  for name in ours:
    if only in name:
      if exact:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
      else:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=2e-6, err_msg=name)


def assert_same_metrics(metrics, other):
  assert metrics.keys() == other.keys()
  for name, value in metrics.items():
    np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-6, err_msg=name)


def reference_step(config: AlgorithmConfig, state: TrainState, toys: list[toy.Toy]):
  """The step by plain loops over trajectories, one per row, with nothing shared but the losses' definitions."""
  batch = toy.pack([[t] for t in toys], 32)
  masks = [np.flatnonzero(t.action_mask) for t in toys]
  n_tokens = sum(len(m) for m in masks)

  def critic_loss(leaves, params):
    outputs = toy.value_apply(replace_leaves(params, leaves), batch)
    total = 0.0
    for row, (t, sampled) in enumerate(zip(toys, masks, strict=True)):
      for k in sampled:
        total += (outputs[row, k - 1, 0] - t.reward) ** 2
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
  if config.whiten_advantages:
    advantages = [(a - flat.mean()) / flat.std() for a in advantages]

  def policy_loss(params):
    logprobs, _ = toy.policy_apply(params, batch)
    total, rejected = 0.0, 0
    for row, (t, sampled) in enumerate(zip(toys, masks, strict=True)):
      for k, advantage in zip(sampled, advantages[row], strict=True):
        ratio = float(jnp.exp(jax.lax.stop_gradient(logprobs[row, k]) - t.behavior_logprobs[k]))
        if 1 - config.epsilon_low < ratio < 1 + config.epsilon_high:
          total -= ratio * advantage * logprobs[row, k]
        else:
          rejected += 1
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


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_data_parallel_width_changes_nothing(micro_batches):
  """Rows sharded over devices, also when micro-batched."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
  config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
  batch = jax.device_put(toy.pack(SPREAD, 32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  state = jax.device_put(toy.train_state(), replicated)
  sharded = run(config, batch, state=state)
  base = run(config)
  assert_same(base[0], sharded[0])
  assert_same_metrics(base[1], sharded[1])


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
  np.testing.assert_array_equal(metrics["lag_histogram"], [1, 1, 1, 0])
  assert metrics["lag_negative"] == 1  # version 3 at version 2: shown, not clamped
  logprobs, entropy = toy.policy_apply(toy.policy_params(), toy.pack([toys], 32))
  batch = toy.pack([toys], 32)
  delta = np.abs(logprobs - batch.behavior_logprobs)[0]
  np.testing.assert_allclose(metrics["delta_logprob"], np.mean(delta[[1, 2, 4, 6]]), rtol=1e-5)
  np.testing.assert_allclose(metrics["delta_logprob_by_lag"], [delta[1], delta[2], delta[4], np.nan], rtol=1e-5)
  np.testing.assert_allclose(metrics["entropy"], np.mean(entropy[0, [1, 2, 4, 6]]), rtol=1e-5)
  assert all(x.dtype == jnp.float32 for x in metrics.values())


def test_lag_zero_with_the_same_weights_rejects_nothing():
  batch = toy.pack(SPREAD, 32)
  logprobs, _ = toy.policy_apply(toy.policy_params(), batch)
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


@pytest.mark.parametrize(
  ("change", "policy_skipped", "critic_skipped"),
  [
    (lambda b: b.replace(rewards=b.rewards.at[2].multiply(jnp.inf)), 1, 2),
    (lambda b: b.replace(rewards=jnp.where(b.action_mask, jnp.nan, 0.0)), 1, 2),
    (lambda b: b.replace(behavior_logprobs=jnp.full_like(b.behavior_logprobs, jnp.nan)), 1, 0),
    (lambda b: b.replace(behavior_logprobs=jnp.full_like(b.behavior_logprobs, -jnp.inf)), 1, 0),
    (lambda b: b.replace(action_mask=jnp.zeros_like(b.action_mask)), 1, 2),
  ],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bad_batches_are_skipped_bit_for_bit_and_counted(change, policy_skipped, critic_skipped, micro_batches):
  """Non-finite losses and batches without a sampled token: an empty update, the version still counts."""
  toys = [dataclasses.replace(t, reward=1.0) for t in TOYS]
  batch = change(toy.pack([[t] for t in toys], 32))
  config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
  state, metrics = run(config, batch)
  assert metrics["policy_updates_skipped"] == policy_skipped
  assert metrics["critic_updates_skipped"] == critic_skipped
  assert_same(state.policy, toy.train_state().policy, exact=True)
  assert int(state.critic.step) == 2 - critic_skipped
  if critic_skipped:
    assert_same(state.critic, toy.train_state().critic, exact=True)
  assert state.policy_version == 3
  assert metrics.keys() == run(config)[1].keys()
  # The next batch trains as if nothing had happened.
  if critic_skipped:
    resumed, _ = run(config, state=state.replace(policy_version=jnp.int32(2)))
    assert_same(resumed, run(config)[0], exact=True)


def test_broken_parameters_are_skipped():
  state = toy.train_state()
  state = state.replace(policy=state.policy.replace(params=jax.tree.map(lambda x: x * jnp.nan, state.policy.params)))
  _, metrics = run(state=state)
  assert metrics["policy_updates_skipped"] == 1


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_an_empty_micro_batch_contributes_nothing(micro_batches):
  """Rows 1 and 5 form a micro-batch of their own; without a sampled token it changes neither result nor keys."""
  config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
  observed = [toy.random_toy(np.random.default_rng(9), mask=[0, 0, 0, 0]) for _ in range(2)]
  rows = [SPREAD[0], [observed[0]], SPREAD[1], SPREAD[2], SPREAD[3], [observed[1]], SPREAD[4], SPREAD[5]]
  without = [[] if row[0] in observed else row for row in rows]
  state, metrics = run(config, rows)
  expected, expected_metrics = run(CONFIG, without)
  assert_same(state, expected)
  assert metrics.keys() == expected_metrics.keys()
  np.testing.assert_allclose(metrics["policy_grad_norm"], expected_metrics["policy_grad_norm"], rtol=1e-4)
  assert metrics["num_untrained"] == 2


def test_critic_only_steps_leave_the_policy_alone():
  state, metrics = run(update_policy=False)
  full, full_metrics = run()
  assert_same(state.policy, toy.train_state().policy, exact=True)
  assert_same(state.critic, full.critic)
  assert state.policy_version == 2
  assert metrics.keys() == full_metrics.keys()
  assert all(metrics[name].shape == full_metrics[name].shape for name in metrics)
  undefined = {name for name, value in metrics.items() if np.isnan(value).all()}
  assert undefined == {
    "policy_loss",
    "policy_grad_norm",
    "entropy",
    "rejected_low",
    "rejected_high",
    "effective_sample_size",
    "delta_logprob",
    "delta_logprob_by_lag",
    "advantage_mean",
    "advantage_std",
    *(name for name in metrics if name.startswith("ratio_")),
  }
  for name in metrics.keys() - undefined:
    np.testing.assert_allclose(metrics[name], full_metrics[name], rtol=1e-5, err_msg=name)


def test_critic_only_steps_raise_explained_variance():
  state = toy.train_state()
  # The reward is told by the first sampled token's prefix.
  toys = [
    dataclasses.replace(t, reward=float(t.token_ids[0] % 2), token_ids=t.token_ids[:1].repeat(len(t.token_ids)))
    for t in TOYS
  ]
  history = []
  for _ in range(60):
    state, metrics = run(rows=[[t] for t in toys], state=state, update_policy=False)
    history.append(float(metrics["explained_variance"]))
  assert history[-1] > 0.8
  assert history[-1] > history[0]


def test_zero_head_trains_only_the_head_first():
  """V = 0 and no gradient for the backbone on the first update."""
  state = toy.train_state()
  params = state.critic.params | {"value_head": jnp.zeros_like(state.critic.params["value_head"])}
  state = state.replace(critic=state.critic.replace(params=params))
  before = leaves_of(state.critic)
  state, metrics = run(SINGLE, state=state)
  after = leaves_of(state.critic)
  np.testing.assert_allclose(metrics["explained_variance"], 0.0, atol=1e-6)
  for name in before:
    if "mu" in name:
      assert bool(after[name].any()) == ("value_head" in name), name
  assert not np.array_equal(before[".params['value_head']"], after[".params['value_head']"])


@pytest.mark.parametrize("truncation", ["zero", "bootstrap", "mask"])
def test_truncation_switch(truncation):
  """zero: the value behind the cut is 0. bootstrap: the critic's. mask: the trajectory is not trained at all."""
  config = dataclasses.replace(SINGLE, truncation=truncation)
  cut = [dataclasses.replace(t, truncated=i < 2, reward=0.0 if i < 2 else t.reward) for i, t in enumerate(TOYS)]
  batch = toy.pack([[t] for t in cut], 32)
  _, metrics = run(config, batch)
  outputs = np.asarray(toy.value_apply(toy.value_params(), batch))[..., 0]
  advantages, errors = [], []
  for row, t in enumerate(cut):
    if t.truncated and truncation == "mask":
      continue
    end = outputs[row, len(t.token_ids) - 1] if t.truncated and truncation == "bootstrap" else 0.0
    values = np.concatenate([[0.0], outputs[row, : len(t.token_ids) - 1]])
    lam = 1 - 1 / (1.5 * t.action_mask.sum())
    rewards = np.asarray(batch.rewards)[row, : len(t.token_ids)]
    advantages.extend(toy.gae_loop(rewards, values, t.action_mask, lam=lam, bootstrap=end)[0][t.action_mask])
    errors.extend((values[t.action_mask] - (t.reward + end)) ** 2)
  assert metrics["num_sampled_tokens"] == len(advantages)
  assert metrics["num_truncated"] == 2
  assert metrics["num_untrained"] == (2 if truncation == "mask" else 0)
  np.testing.assert_allclose(metrics["advantage_mean"], np.mean(advantages), rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(metrics["advantage_std"], np.std(advantages), rtol=1e-4)
  np.testing.assert_allclose(metrics["value_loss_first"], np.mean(errors), rtol=1e-5)


def test_without_truncated_trajectories_the_switch_changes_nothing():
  states = [run(dataclasses.replace(SINGLE, truncation=name))[0] for name in ("zero", "bootstrap", "mask")]
  assert_same(states[0], states[1])
  assert_same(states[0], states[2])


def test_critic_lambda_below_one_uses_the_values_before_the_updates():
  config = dataclasses.replace(CONFIG, critic_lambda=0.5)
  _, metrics = run(config)
  batch = toy.pack(SPREAD, 32)
  outputs = np.asarray(toy.value_apply(toy.value_params(), batch))[..., 0]
  errors = []
  for row, t in enumerate(TOYS):
    values = np.concatenate([[0.0], outputs[row, : len(t.token_ids) - 1]])
    rewards = np.asarray(batch.rewards)[row, : len(t.token_ids)]
    errors.extend(toy.gae_loop(rewards, values, t.action_mask, lam=0.5)[0][t.action_mask] ** 2)
  np.testing.assert_allclose(metrics["value_loss_first"], np.mean(errors), rtol=1e-5)


def test_value_clip_acts_from_the_second_update_on():
  """Loss and gradient of the first are those without the clip; the second then moves differently."""
  (free, metrics), (clipped, clipped_metrics) = run(), run(dataclasses.replace(CONFIG, value_clip=1e-4))
  np.testing.assert_allclose(metrics["value_loss_first"], clipped_metrics["value_loss_first"], rtol=1e-5)
  assert clipped_metrics["value_loss_last"] > metrics["value_loss_last"]
  assert not np.allclose(free.critic.params["value_head"], clipped.critic.params["value_head"], atol=1e-5)


def test_hl_gauss_head_trains():
  config = dataclasses.replace(CONFIG, value_head="hl_gauss", value_bins=11)
  state, losses = toy.train_state(outputs=11), []
  for _ in range(20):
    state, metrics = run(config, state=state)
    losses.append(float(metrics["value_loss_first"]))
  assert losses[-1] < losses[0]
  assert 0 <= metrics["explained_variance"] <= 1
  assert metrics["value_loss_last"] < metrics["value_loss_first"]


def test_the_state_is_donated_and_the_step_compiles_once():
  step, state = toy.train_step(CONFIG), toy.train_state()
  embed = state.policy.params["embed"]
  compiled = step._cache_size()
  state, _ = step(state, toy.pack(SPREAD, 32))
  assert embed.is_deleted()
  first = step._cache_size()
  for _ in range(3):
    state, _ = step(state, toy.pack(SPREAD[::-1], 32))
  assert step._cache_size() == first <= compiled + 1
  assert state.policy_version == 6


def test_rows_that_micro_batches_do_not_divide_are_refused():
  with pytest.raises(ConfigError, match="algorithm.micro_batches"):
    run(dataclasses.replace(CONFIG, micro_batches=3))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("epsilon_low", 0.0),
    ("epsilon_low", 1.5),
    ("epsilon_high", 0.0),
    ("epsilon_high", float("nan")),
    ("gamma", 1.1),
    ("gamma", -0.1),
    ("alpha", 0.5),
    ("critic_lambda", 1.5),
    ("value_updates", 0),
    ("advantage_values", "during"),
    ("truncation", "none"),
    ("value_head", "linear"),
    ("value_clip", -0.1),
    ("micro_batches", 0),
  ],
)
def test_settings_that_cannot_work_are_refused(field, value):
  with pytest.raises(ConfigError, match=f"algorithm.{field}"):
    toy.train_step.__wrapped__(dataclasses.replace(CONFIG, **{field: value}))


@pytest.mark.parametrize("changes", [{"value_clip": 0.2}, {"value_bins": 5}, {"value_min": 1.0}])
def test_hl_gauss_settings_that_cannot_work_are_refused(changes):
  with pytest.raises(ConfigError, match="algorithm.value_"):
    toy.train_step.__wrapped__(dataclasses.replace(CONFIG, value_head="hl_gauss", **changes))
