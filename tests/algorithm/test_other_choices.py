"""The numbers of the README's section on other choices, each computed with our own functions."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import algorithm_toy as toy

from sao_jax.algorithm.advantage import masked_whiten, sao_advantages, skip_observation_gae, value_targets
from sao_jax.algorithm.policy_loss import dis_policy_loss
from sao_jax.config import AlgorithmConfig

README = pathlib.Path(__file__).parents[2] / "sao_jax/algorithm/README.md"
SECTION = README.read_text().split("## What other choices do to the numbers")[1]

# Behind a prompt token; entry t of `STATE_VALUES` has read token t.
TRAJECTORY = toy.random_toy(np.random.default_rng(0), [0, 1, 1, 0, 0, 1], reward=1.0)
BATCH = toy.pack([[TRAJECTORY]], 8)
STATE_VALUES = jnp.array([[0.5, 0.6, 9.0, 9.0, 0.7, 0.0, 0.0, 0.0]])
SAMPLED = [1, 2, 5]
IN_SEGMENTS = BATCH.replace(segment_ids=jnp.array([[1, 1, 1, 1, 2, 2, 0, 0]]))  # the last token behind a prompt of one


def row(beginning: str) -> list[float]:
  """The numbers in the second cell of the row that begins so."""
  (line,) = (line for line in SECTION.splitlines() if line.startswith(f"| {beginning}"))
  return [float(number) for number in re.findall(r"-?\d*\.\d{4}", line.split("|")[2])]


@pytest.mark.parametrize(
  "beginning, changes",
  [
    ("from each sampled token", {}),
    ("λ's n = 5", {"lambda_length": "response"}),
    ("λ = .95 for", {"policy_lambda": 0.95}),
    ("through the observation", {"gae": "through_observations"}),
    ("from turn to turn, V its mean", {"gae": "step_average"}),
    ("from turn to turn, V that", {"gae": "step_last"}),
  ],
)
def test_advantages(beginning, changes):
  advantages = sao_advantages(AlgorithmConfig(**changes), BATCH, STATE_VALUES)
  np.testing.assert_allclose(row(beginning), np.asarray(advantages)[0, SAMPLED], atol=6e-5)


def test_gae_that_begins_anew_in_each_turn():
  first = skip_observation_gae(jnp.zeros(2), jnp.array([0.5, 0.6]), jnp.array([True, True]), lam=7 / 9)
  last = skip_observation_gae(jnp.ones(1), jnp.array([0.7]), jnp.array([True]), lam=7 / 9)
  np.testing.assert_allclose(row("anew in each turn"), [*first, *last], atol=6e-5)


@pytest.mark.parametrize("beginning, place", [("R where as many", 1), ("R on an observation behind", None)])
def test_a_reward_that_falls_on_an_observation(beginning, place):
  """GAE gives it to the action before, as one implementation does, or does not see it."""
  mask, values = jnp.array([True, True, False, False, True]), jnp.array([0.5, 0.6, 9.0, 9.0, 0.7])
  rewards = jnp.zeros(5) if place is None else jnp.zeros(5).at[place].set(1.0)
  advantages = skip_observation_gae(rewards, values, mask, lam=7 / 9 if place is None else 0.95)
  np.testing.assert_allclose(row(beginning), advantages[mask], atol=6e-5)


def test_values_from_after_the_updates_shrink_the_batchs_own_advantages():
  closer = STATE_VALUES + 0.1 * (1.0 - STATE_VALUES)
  advantages = np.asarray(sao_advantages(AlgorithmConfig(), BATCH, closer))[0, SAMPLED]
  np.testing.assert_allclose(row("V after updates"), advantages, atol=6e-5)
  np.testing.assert_allclose(advantages, 0.9 * np.array(row("from each sampled token")), atol=6e-5)


def test_whitening():
  advantages = sao_advantages(AlgorithmConfig(), BATCH, STATE_VALUES)
  whitened = masked_whiten(advantages, BATCH.action_mask)
  np.testing.assert_allclose(row("whitened"), np.asarray(whitened)[0, SAMPLED], atol=6e-5)


@pytest.mark.parametrize(
  "beginning, changes",
  [
    ("one trajectory", {}),
    ("each to its end with R there, times", {"gae": "segments"}),
    ("the same, λ's n the segment's", {"gae": "segments", "lambda_length": "segment"}),
  ],
)
def test_credit_over_segments(beginning, changes):
  advantages = sao_advantages(AlgorithmConfig(**changes), IN_SEGMENTS, STATE_VALUES)
  np.testing.assert_allclose(row(beginning), np.asarray(advantages)[0, SAMPLED], atol=6e-5)


def test_credit_of_each_segment_by_itself():
  first = skip_observation_gae(jnp.array([0.0, 1.0]), jnp.array([0.5, 0.6]), jnp.ones(2, bool), lam=7 / 9)
  np.testing.assert_allclose(row("each to its end with R there |"), [*first, 1.0 - 0.7], atol=6e-5)


def test_what_is_left_of_a_reward_to_the_first_of_four_segments():
  for share, n in ((".6065", 4_000_000), (".1353", 1_000_000)):
    assert f"{(1 - 1 / (1.5 * n)) ** 3_000_000:.4f}" == f"0{share}" and share in SECTION


@pytest.mark.parametrize(
  "beginning, critic_lambda", [("λ of the critic", 1.0), ("the policy's λ", 7 / 9), ("λ = .95, as the policy's", 0.95)]
)
def test_targets(beginning, critic_lambda):
  targets = value_targets(AlgorithmConfig(critic_lambda=critic_lambda), BATCH, STATE_VALUES)
  np.testing.assert_allclose(row(beginning), np.asarray(targets)[0, SAMPLED], atol=6e-5)


def test_a_differentiated_weight_turns_the_update_around():
  """d/d log π of ρ log π at ρ = 1, by jax, against the factor of DIS."""
  one, mask = jnp.ones(1), jnp.ones(1, bool)
  factors = []
  for probability in (0.2, 0.01):
    at = jnp.log(jnp.full(1, probability))
    literal = jax.grad(lambda logprob, at=at: jnp.sum(jnp.exp(logprob - at) * logprob))(at)
    dis = lambda logprob, at=at: -dis_policy_loss(logprob, at, one, mask, epsilon_low=0.3, epsilon_high=5.0).sum()
    np.testing.assert_allclose(jax.grad(dis)(at), row("stop-gradient around"))
    factors.append(float(literal[0]))
  np.testing.assert_allclose(row("f(ρ) differentiated"), factors, atol=6e-5)


def test_denominators():
  ratios = jnp.array([0.7, 0.8, 2.0, 6.0])
  loss = lambda logprobs: -dis_policy_loss(
    logprobs, -jnp.log(ratios), jnp.ones(4), jnp.ones(4, bool), epsilon_low=0.3, epsilon_high=5.0
  ).sum()  # fmt: skip
  factors = np.asarray(jax.grad(loss)(jnp.zeros(4)))
  assert row("ρ = .7, .8, 2, 6") == [pytest.approx(factors.sum() / 4)]
  assert row("the same, N counts") == [pytest.approx(factors.sum() / np.count_nonzero(factors))]
  assert row("the same, closed bounds") == [pytest.approx(float(ratios.mean()))]  # the two at the bounds count, too

  # Four equal parts, each a mean of its own, add up to four times the mean of all.
  assert sum(part.mean() for part in np.split(np.ones(8), 4)) == 4 * np.ones(8).mean() and "4 times as large" in SECTION


def test_a_large_ratio_is_no_nan_here():
  far, one, mask = jnp.full(1, 100.0), jnp.ones(1), jnp.ones(1, bool)
  gradient = jax.grad(lambda x: dis_policy_loss(x, x - far, one, mask, epsilon_low=0.3, epsilon_high=5.0).sum())
  assert gradient(jnp.zeros(1)) == 0.0
  assert jnp.isnan(jnp.exp(far) * 0.0).all() and "| log ρ = 100, exp before the mask | NaN |" in SECTION


def test_what_is_left_of_a_reward_far_away():
  assert f"leaves {0.999**9999:.1e} of the reward" in SECTION
  for n in (1000, 10_000, 131_072):  # in double: next to 1 an fp32 has too few digits for this
    assert f"{(1 - 1 / (1.5 * n)) ** n:.3f}" == "0.513" and "leaves .5134" in SECTION
