"""The train step's guards, modes and options, on toy networks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import algorithm_toy as toy
from toys.algorithm_toy import CONFIG, SINGLE, SPREAD, TOYS, assert_same, leaves_of, run

from sao_jax.algorithm.train_step import make_train_step
from sao_jax.errors import ConfigError


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
  if (policy_skipped, critic_skipped) == (1, 0):  # evidence that is no number is noticed
    assert not np.isfinite(metrics["delta_logprob"])
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


def test_the_policy_learns_nothing_from_a_critic_whose_own_update_was_skipped():
  """Values near 1e20 are finite, and so are the policy's gradients; only the critic's squared errors overflow."""
  state = toy.train_state()
  diverged = state.critic.params | {"value_head": state.critic.params["value_head"] * 1e20}
  state, metrics = run(SINGLE, state=state.replace(critic=state.critic.replace(params=diverged)))
  assert metrics["critic_updates_skipped"] == 1 and np.isinf(metrics["value_loss_first"])
  assert np.isfinite(metrics["advantage_mean"]) and np.isfinite(metrics["policy_grad_norm"])
  assert metrics["policy_updates_skipped"] == 1
  assert_same(state.policy, toy.train_state().policy, exact=True)
  assert state.policy_version == 3


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


def test_demonstrations_get_the_logprobs_of_the_policy_in_critic_only_steps():
  """For a critic that reads them. What a sampler recorded stays, and RL makes up for nothing that is missing."""

  def reading(params, batch):
    logprobs = jnp.where(batch.action_mask, batch.behavior_logprobs, 0.0)
    return toy.value_apply(params, batch) + logprobs[..., None]

  config = dataclasses.replace(SINGLE, critic_reads_logprobs=True, micro_batches=2)
  critic = dataclasses.replace(toy.CRITIC, apply=reading)
  pretrain = make_train_step(config, toy.POLICY, critic, update_policy=False)
  recorded = toy.pack(SPREAD, 32)
  policys = recorded.replace(behavior_logprobs=toy.policy_apply(toy.policy_params(), recorded).logprobs)

  def critic_after(logprobs, rows):
    """Trains on the toys with other log-probs on the first so many rows."""
    batch = recorded.replace(behavior_logprobs=recorded.behavior_logprobs.at[:rows].set(logprobs))
    state, metrics = pretrain(toy.train_state(), batch)
    assert metrics["critic_updates_skipped"] == np.isnan(state.critic.params["value_head"]).any() == 0
    return state.critic, float(metrics["value_loss_first"])

  # Rows that are demonstrations: none, half, and all of them.
  _, of_rollouts = critic_after(jnp.nan, 0)
  for rows in (4, 8):
    shown, loss = critic_after(jnp.nan, rows)
    expected, expected_loss = critic_after(policys.behavior_logprobs[:rows], rows)
    assert_same(shown, expected)
    assert loss == pytest.approx(expected_loss, rel=1e-5) and abs(loss - of_rollouts) > 1e-3

  # A log-prob that is missing in RL is broken evidence.
  broken = recorded.replace(behavior_logprobs=jnp.full_like(recorded.behavior_logprobs, jnp.nan))
  _, metrics = make_train_step(config, toy.POLICY, critic)(toy.train_state(), broken)
  assert metrics["critic_updates_skipped"] == metrics["policy_updates_skipped"] == 1


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
  assert metrics["num_trained_tokens"] == len(advantages)
  assert metrics["num_sampled_tokens"] == sum(t.action_mask.sum() for t in cut)
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
  assert metrics["value_targets_clipped"] == 0
  outside = [dataclasses.replace(t, reward=1.5 if i == 2 else t.reward) for i, t in enumerate(TOYS)]
  _, metrics = run(config, [[t] for t in outside], state=state)
  share = outside[2].action_mask.sum() / sum(t.action_mask.sum() for t in outside)
  np.testing.assert_allclose(metrics["value_targets_clipped"], share, rtol=1e-6)
  assert run(rows=[[t] for t in outside])[1]["value_targets_clipped"] == 0  # a scalar has no range


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
