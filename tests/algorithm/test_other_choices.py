"""The numbers of the README's section on other choices, each computed with our own functions."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import algorithm_toy as toy

from sao_jax.algorithm.advantage import sao_advantages, skip_observation_gae, value_targets
from sao_jax.algorithm.policy_loss import dis_policy_loss
from sao_jax.config import AlgorithmConfig

README = pathlib.Path(__file__).parents[2] / "sao_jax/algorithm/README.md"
SECTION = README.read_text().split("## What other choices do to the numbers")[1]

# Behind a prompt token; entry t of `STATE_VALUES` has read token t.
TRAJECTORY = toy.random_toy(np.random.default_rng(0), [0, 1, 1, 0, 0, 1], reward=1.0)
BATCH = toy.pack([[TRAJECTORY]], 8)
STATE_VALUES = jnp.array([[0.5, 0.6, 9.0, 9.0, 0.7, 0.0, 0.0, 0.0]])
SAMPLED = [1, 2, 5]


def row(beginning: str) -> list[float]:
  """The numbers in the second cell of the row that begins so."""
  (line,) = (line for line in SECTION.splitlines() if line.startswith(f"| {beginning}"))
  return [float(number) for number in re.findall(r"-?\d*\.\d{4}", line.split("|")[2])]


@pytest.mark.parametrize(
  "beginning, changes",
  [
    ("from each sampled token", {}),
    ("λ's n = 5", {"lambda_length": "response"}),
    ("λ = .95", {"policy_lambda": 0.95}),
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


@pytest.mark.parametrize("beginning, critic_lambda", [("λ of the critic", 1.0), ("the policy's λ", 7 / 9)])
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

  # Four equal parts, each a mean of its own, add up to four times the mean of all.
  assert sum(part.mean() for part in np.split(np.ones(8), 4)) == 4 * np.ones(8).mean() and "4 times as large" in SECTION


def test_what_is_left_of_a_reward_far_away():
  assert f"leaves {0.999**9999:.1e} of the reward" in SECTION
  for n in (1000, 10_000, 131_072):  # in double: next to 1 an fp32 has too few digits for this
    assert f"{(1 - 1 / (1.5 * n)) ** n:.3f}" == "0.513" and "leaves .5134" in SECTION
