"""Policy losses beside DIS, and their reductions: coefficients, the published objectives, plain loops."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import algorithm_toy as toy
from toys import pieces_toy

from sao_jax.algorithm.loss_reduction import loss_scales
from sao_jax.algorithm.loss_variants import POLICY_LOSSES, policy_token_losses
from sao_jax.algorithm.policy_loss import dis_policy_loss
from sao_jax.algorithm.tokens import trained_tokens
from sao_jax.algorithm.train_step import make_train_step
from sao_jax.config import AlgorithmConfig

DAPO = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def coefficients(loss, ratios, advantages, **epsilons):
  """The factors of A ∇log π: what the gradient of a sum of token losses has, with its sign turned."""
  config = AlgorithmConfig(policy_loss=loss, **(epsilons or DAPO))
  ratios, advantages = (jnp.asarray(x, jnp.float32) for x in (ratios, advantages))
  mask, total = jnp.ones(ratios.shape, bool), lambda logprobs: policy_token_losses(
    config, logprobs, -jnp.log(ratios), advantages, mask
  ).sum()  # fmt: skip
  return -np.asarray(jax.grad(total)(jnp.zeros(ratios.shape)))


RATIOS, SIGNS = [8, 8, 3, 3, 0.5, 0.5, 0.1, 1.1], [-1, 1, 1, -1, 1, -1, 1, 1]


@pytest.mark.parametrize(
  "loss, epsilons, expected",
  [
    ("ppo", DAPO, [-8, 0, 0, -3, 0.5, 0, 0.1, 1.1]),
    ("dis", {"epsilon_low": 0.3, "epsilon_high": 5.0}, [0, 0, 3, -3, 0, 0, 0, 1.1]),
    ("dis", {"epsilon_low": 0.8, "epsilon_high": 3.0}, [0, 0, 3, -3, 0.5, -0.5, 0, 1.1]),
    ("cispo", {"epsilon_low": 1.0, "epsilon_high": 0.28}, [-1.28, 1.28, 1.28, -1.28, 0.5, -0.5, 0.1, 1.1]),
    ("cispo", DAPO, [-1.28, 1.28, 1.28, -1.28, 0.8, -0.8, 0.8, 1.1]),
    ("reinforce", DAPO, SIGNS),
  ],
)
def test_coefficients_of_log_pi(loss, epsilons, expected):
  np.testing.assert_allclose(coefficients(loss, RATIOS, SIGNS, **epsilons), expected, rtol=1e-5)


def test_ppo_has_the_gradient_of_the_published_surrogate():
  """min(ρA, clip(ρ)A), differentiated by jax."""
  rng = np.random.default_rng(0)
  ratios, advantages = np.exp(rng.normal(0, 0.5, 400)), rng.normal(size=400)
  behavior = -np.log(ratios).astype(np.float32)

  def surrogate(logprobs):
    ratio = jnp.exp(logprobs - behavior)
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages).sum()

  expected = jax.grad(surrogate)(jnp.zeros(400))
  np.testing.assert_allclose(coefficients("ppo", ratios, advantages), expected, rtol=1e-4, atol=1e-6)


def test_dis_of_the_table_is_the_function_of_the_paper():
  rng = np.random.default_rng(1)
  logprobs, behavior, advantages = rng.normal(size=(3, 200)).astype(np.float32)
  mask, epsilons = jnp.asarray(rng.random(200) < 0.8), {"epsilon_low": 0.8, "epsilon_high": 3.0}
  config = AlgorithmConfig(policy_loss="dis", **epsilons)
  np.testing.assert_array_equal(
    policy_token_losses(config, logprobs, behavior, advantages, mask),
    dis_policy_loss(logprobs, behavior, advantages, mask, **epsilons),
  )


def test_garbage_outside_of_the_mask_reaches_no_gradient():
  mask = jnp.array([True, False, False, True])
  behavior = jnp.array([-1.0, jnp.nan, -1e9, -2.0])
  advantages = jnp.array([1.0, jnp.nan, jnp.inf, -1.0])
  for loss in POLICY_LOSSES:
    losses = functools.partial(policy_token_losses, AlgorithmConfig(policy_loss=loss, **DAPO))
    total = lambda x, losses=losses: losses(x, behavior, advantages, mask).sum()
    grads = np.asarray(jax.grad(total)(jnp.array([-1.0, jnp.nan, 0.0, -2.0])))
    np.testing.assert_allclose(grads, [-1.0, 0.0, 0.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_reductions_count_tokens_or_trajectories_wherever_they_lie(reduction):
  """In random rows: Σ w x / d is the mean over tokens, the mean of means, or a sum over a constant."""
  config = AlgorithmConfig(policy_loss_reduction=reduction, loss_length=50)
  rng = np.random.default_rng(3)
  trajectories = [pieces_toy.random_trajectory(rng, index) for index in range(4)]
  trajectories[1] = dataclasses.replace(trajectories[1], loss_mask=np.zeros(len(trajectories[1]), bool))
  batch = pieces_toy.lay_out_at_random(trajectories, rng, grouped=False)
  trained = trained_tokens(batch)
  scales, denominator = loss_scales(config, batch, trained)
  losses = np.where(trained, np.asarray(batch.token_ids, np.float64), 0.0)
  got = float((losses * np.asarray(scales)).sum() / denominator)

  own = [t.token_ids[t.trained].astype(np.float64) for t in trajectories if t.num_trained]
  expected = {
    "token_mean": np.concatenate(own).mean(),
    "sequence_mean": np.mean([x.mean() for x in own]),
    "constant": np.concatenate(own).sum() / (3 * 50),
  }[reduction]
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def plain_gradient(config: AlgorithmConfig, trajectories, advantages):
  """The gradient of the policy's table of logits, trajectory by trajectory, in double."""
  table = pieces_toy.params()[0]["table"].astype(np.float64)
  logs = table - np.log(np.exp(table).sum(axis=-1, keepdims=True))
  low, high = 1.0 - config.epsilon_low, 1.0 + config.epsilon_high
  number = sum(t.num_trained for t in trajectories)
  alive = sum(t.num_trained > 0 for t in trajectories)

  gradient = np.zeros_like(table)
  for t, own in zip(trajectories, advantages, strict=True):
    trained = np.flatnonzero(t.trained)
    ratios = np.exp(logs[t.token_ids[trained - 1], t.token_ids[trained]] - t.behavior_logprobs[trained])
    if config.policy_loss == "gspo" and len(trained):
      ratios[:] = np.exp(np.log(ratios).mean())
    scale = {
      "token_mean": 1.0 / number,
      "sequence_mean": 1.0 / (max(len(trained), 1) * alive),
      "constant": 1.0 / (alive * config.loss_length),
    }[config.policy_loss_reduction]
    for i, ratio in zip(trained, ratios, strict=True):
      out = (own[i] > 0 and ratio > high) or (own[i] < 0 and ratio < low)
      f = {"cispo": np.clip(ratio, low, high), "reinforce": 1.0}.get(config.policy_loss, 0.0 if out else ratio)
      before, token = t.token_ids[i - 1], t.token_ids[i]
      gradient[before] += scale * f * own[i] * np.exp(logs[before])
      gradient[before, token] -= scale * f * own[i]
  return gradient


@functools.cache
def compiled(config: AlgorithmConfig):
  return make_train_step(config, pieces_toy.POLICY, pieces_toy.CRITIC)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
  "loss, reduction",
  [("ppo", "sequence_mean"), ("cispo", "token_mean"), ("gspo", "sequence_mean"), ("reinforce", "constant")],
)
def test_a_step_equals_a_plain_loop_over_trajectories(loss, reduction, micro_batches):
  """Trajectories in any rows and micro-batches; gspo's ratio is one of the whole trajectory all the same."""
  config = AlgorithmConfig(
    policy_loss=loss, policy_loss_reduction=reduction, loss_length=30, whiten_advantages=False,
    advantage_values="pre", value_updates=1, micro_batches=micro_batches, epsilon_low=0.4, epsilon_high=0.6,
  )  # fmt: skip
  rng = np.random.default_rng(11)
  trajectories = [pieces_toy.random_trajectory(rng, index) for index in range(4)]
  batch = pieces_toy.lay_out_at_random(trajectories, rng, grouped=False)
  state, metrics = compiled(config)(pieces_toy.train_state(), batch)

  loop = pieces_toy.plain_loop(dataclasses.replace(config, policy_loss="dis"), trajectories)
  advantages = [np.zeros(len(t)) for t in trajectories]
  for t, out, own in zip(trajectories, advantages, loop.advantages, strict=True):
    out[t.action_mask] = own
  got = pieces_toy.params()[0]["table"] - np.asarray(state.policy.params["table"])
  np.testing.assert_allclose(got, plain_gradient(config, trajectories, advantages), atol=3e-6)
  assert metrics["policy_updates_skipped"] == 0
  assert (metrics["rejected_low"] + metrics["rejected_high"] > 0) == (loss != "reinforce")


def test_a_ratio_that_overflows_skips_the_update_and_is_counted():
  """ppo bounds nothing where A < 0: an infinite loss must not pass for a number."""
  config = dataclasses.replace(toy.SINGLE, policy_loss="ppo", **DAPO)
  bad = dataclasses.replace(toy.TOYS[0], reward=-50.0)
  bad = dataclasses.replace(bad, behavior_logprobs=np.where(bad.action_mask, -2000.0, np.nan).astype(np.float32))
  before = toy.train_state()
  names = {name: np.array(leaf) for name, leaf in toy.leaves_of(before).items() if "policy.params" in name}
  state, metrics = toy.run(config, [[bad], *toy.SPREAD[1:]], state=before)
  assert metrics["policy_updates_skipped"] == 1 and not np.isfinite(metrics["policy_loss"])
  for name, leaf in names.items():
    np.testing.assert_array_equal(leaf, toy.leaves_of(state)[name])
