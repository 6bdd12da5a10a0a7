"""Sampled tokens that are not trained (over age): the losses leave them out, λ and the recursion do not."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from toys import algorithm_toy as toy
from toys.algorithm_toy import SINGLE, TOYS, assert_same, run

from sao_jax.algorithm.advantage import sao_advantages, value_targets
from sao_jax.algorithm.tokens import sampled_tokens, trained_tokens
from sao_jax.config import AlgorithmConfig

CONFIG = AlgorithmConfig()


def test_the_others_keep_their_advantages():
  """M = [1,1,0,0,1], V = [.5,.6,9,9,.7], R = 1, n = 3, λ = 7/9, the first token over age."""
  mask, old = np.array([0, 1, 1, 0, 0, 1], bool), np.array([0, 1, 0, 0, 0, 0], bool)
  one = toy.random_toy(np.random.default_rng(0), mask=mask, reward=1.0, loss_mask=mask & ~old)
  batch = toy.pack([[one]], 6)
  values = jnp.array([[0.5, 0.6, 9.0, 9.0, 0.7, 0.0]], jnp.float32)  # state-aligned: of the token behind
  advantages = sao_advantages(CONFIG, batch, values)
  np.testing.assert_allclose(advantages, [[0, 0.359259, 0.333333, 0, 0, 0.3]], atol=1e-6)
  np.testing.assert_array_equal(value_targets(CONFIG, batch, None), [[0, 1, 1, 0, 0, 1]])
  assert trained_tokens(batch, "zero").tolist() == [[False, False, True, False, False, True]]
  assert sampled_tokens(batch).tolist() == [mask.tolist()]
  # As context it would shorten n to 2: λ = 2/3, and 0.1 + 2/3 · 0.3 = 0.3 on the second token.
  as_context = sao_advantages(CONFIG, batch.replace(action_mask=batch.loss_mask), values)
  np.testing.assert_allclose(as_context, [[0, 0, 0.3, 0, 0, 0.3]], atol=1e-6)
  # And in the middle, where the reward passes through it: V = .6 keeps its place between .5 and .7.
  middle = batch.replace(loss_mask=jnp.asarray([mask & ~np.array([0, 0, 1, 0, 0, 0], bool)]))
  np.testing.assert_allclose(sao_advantages(CONFIG, middle, values), advantages, atol=1e-6)


def test_both_losses_leave_them_out():
  """Against plain loops: sums over the trained tokens, divided by their number; advantages over all sampled ones."""
  old = [t.action_mask & (np.cumsum(t.action_mask) <= i % 3) for i, t in enumerate(TOYS)]
  old[0] = TOYS[0].action_mask  # nothing of it is left
  toys = [dataclasses.replace(t, loss_mask=t.action_mask & ~over) for t, over in zip(TOYS, old)]
  batch = toy.pack([[t] for t in toys], 32)
  state, metrics = run(SINGLE, batch)
  outputs = np.asarray(toy.value_apply(toy.value_params(), batch))[..., 0]
  logprobs = np.asarray(toy.policy_apply(toy.policy_params(), batch).logprobs)
  advantages, errors, terms, lags = [], [], [], []
  for row, t in enumerate(toys):
    length, trained = len(t.token_ids), t.loss_mask
    values = np.concatenate([[0.0], outputs[row, : length - 1]])
    lam = 1 - 1 / (1.5 * t.action_mask.sum())
    gae = toy.gae_loop(np.asarray(batch.rewards)[row, :length], values, t.action_mask, lam=lam)[0][trained]
    ratios = np.exp(logprobs[row, :length] - t.behavior_logprobs)[trained]
    kept = (ratios > 1 - SINGLE.epsilon_low) & (ratios < 1 + SINGLE.epsilon_high)
    advantages.extend(gae)
    errors.extend((values[trained] - t.reward) ** 2)
    terms.extend(np.where(kept, ratios, 0) * gae * logprobs[row, :length][trained])
    lags.extend(2 - t.versions[trained])
  assert metrics["num_trained_tokens"] == len(errors) < metrics["num_sampled_tokens"]
  assert metrics["num_untrained"] == 1
  np.testing.assert_allclose(metrics["value_loss_first"], np.mean(errors), rtol=1e-5)
  np.testing.assert_allclose(metrics["policy_loss"], -np.mean(terms), rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(metrics["advantage_mean"], np.mean(advantages), rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(metrics["lag_mean"], np.mean(lags), rtol=1e-5)
  # What was recorded on them is not read: neither network moves otherwise.
  poisoned = batch.replace(
    behavior_logprobs=jnp.where(batch.loss_mask, batch.behavior_logprobs, jnp.nan),
    policy_version=jnp.where(batch.loss_mask, batch.policy_version, 99),
  )
  assert_same(run(SINGLE, poisoned)[0], state, exact=True)


def test_a_trajectory_that_is_not_trained_at_all_is_as_good_as_not_there():
  """Whitening is over the trained tokens, too."""
  masked = dataclasses.replace(TOYS[0], reward=7.0, loss_mask=np.zeros_like(TOYS[0].action_mask))
  others = [[t] for t in TOYS[1:]]
  with_it, _ = run(toy.CONFIG, [[masked], *others])
  without, _ = run(toy.CONFIG, [[], *others])
  assert_same(with_it, without)


def test_a_loss_mask_of_everything_changes_nothing_and_of_nothing_trains_nothing():
  batch = toy.pack([[t] for t in TOYS], 32)
  assert_same(
    run(SINGLE, batch.replace(loss_mask=jnp.ones_like(batch.loss_mask)))[0], run(SINGLE, batch)[0], exact=True
  )
  state, metrics = run(SINGLE, batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask)))
  assert_same(state.policy, toy.train_state().policy, exact=True)
  assert_same(state.critic, toy.train_state().critic, exact=True)
  assert (metrics["policy_updates_skipped"], metrics["critic_updates_skipped"]) == (1, 1)
  assert metrics["num_trained_tokens"] == 0 < metrics["num_sampled_tokens"]
