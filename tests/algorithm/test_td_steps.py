"""The variants of GAE: golden numbers, and trajectories in any rows against a plain loop over whole trajectories."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from toys import algorithm_toy, pieces_toy

from sao_jax.algorithm.advantage import sao_advantages
from sao_jax.algorithm.td_steps import valued_tokens
from sao_jax.algorithm.tokens import trained_tokens
from sao_jax.algorithm.train_step import make_train_step
from sao_jax.config import AlgorithmConfig
from sao_jax.learner.packing import unpack

CONFIG = AlgorithmConfig(whiten_advantages=False, advantage_values="pre", value_updates=1)


def advantages_of(mask, values, reward=1.0, **changes):
  """Advantages of one trajectory behind a prompt token; `values[t]` is V before token t."""
  mask = np.array([0, *mask], bool)
  toy = algorithm_toy.random_toy(np.random.default_rng(0), mask.astype(int).tolist(), reward=reward)
  batch = algorithm_toy.pack([[toy]], 16)
  state_values = jnp.zeros((1, 16)).at[0, : len(values)].set(jnp.array(values))  # entry t has read token t
  config = dataclasses.replace(CONFIG, **changes)
  return np.asarray(sao_advantages(config, batch, state_values))[0, 1 : len(mask)]


MASK, VALUES = [1, 1, 0, 0, 1], [0.5, 0.6, 9.0, 9.0, 0.7]


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, [0.359259, 0.333333, 0, 0, 0.3]),
    # Through the observations, whose values of 9 nobody has taught: the fault that skipping them avoids.
    ({"gae": "through_observations"}, [2.8379, 3.5202, 0, 0, 0.3]),
    # λ = 1 - 1/(1.5 * 5) for a response of 5 tokens, where 3 were sampled.
    ({"lambda_length": "response"}, [0.412, 0.36, 0, 0, 0.3]),
    ({"policy_lambda": 1.0}, [0.5, 0.4, 0, 0, 0.3]),
    ({"policy_lambda": 0.0}, [0.1, 0.1, 0, 0, 0.3]),
    # Two turns, λ = 1 - 1/(1.5 * 2) = 2/3. Values .55 (or .6) and .7: A_1 = .3, A_0 = V_1 - V_0 + 2/3 * .3.
    ({"gae": "step_average"}, [0.35, 0.35, 0, 0, 0.3]),
    ({"gae": "step_last"}, [0.3, 0.3, 0, 0, 0.3]),
    ({"gae": "step_last", "policy_lambda": 0.0}, [0.1, 0.1, 0, 0, 0.3]),
  ],
)
def test_golden_numbers(changes, expected):
  np.testing.assert_allclose(advantages_of(MASK, VALUES, **changes), expected, atol=2e-4)


def test_values_on_observations_matter_only_where_gae_runs_through_them():
  other = [0.5, 0.6, -4.0, 2.0, 0.7]
  for gae in ("token", "step_average", "step_last"):
    np.testing.assert_array_equal(advantages_of(MASK, VALUES, gae=gae), advantages_of(MASK, other, gae=gae))
  assert np.abs(np.subtract(*(advantages_of(MASK, v, gae="through_observations") for v in (VALUES, other)))).max() > 1


def test_the_step_variants_are_token_level_gae_where_turns_have_one_token():
  mask, values = [1, 0, 1, 0, 0, 1], [0.2, 7.0, 0.4, 7.0, 7.0, 0.9]
  for gae in ("step_average", "step_last"):
    np.testing.assert_allclose(advantages_of(mask, values, gae=gae), advantages_of(mask, values), atol=1e-6)


def plain_advantages(config: AlgorithmConfig, t, state_values: np.ndarray) -> np.ndarray:
  """Of all tokens of a trajectory, in double, one after the other."""
  begins, mask = set(t.segment_starts.tolist()), t.action_mask
  before = {i: state_values[i - 1] for i in range(len(t)) if i not in begins}
  rewards = dict.fromkeys(np.flatnonzero(mask).tolist(), 0.0)
  for reward, stop in zip(t.turn_rewards, [*t.turn_starts[1:], len(t)], strict=True):
    rewards[max(i for i in rewards if i < stop)] += reward

  # The tokens that each step is made of.
  sampled = sorted(rewards)
  runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(sampled), lambda pair: pair[1] - pair[0])]
  segments = [
    [i for i in sampled if begin <= i < end]
    for begin, end in zip(t.segment_starts, [*t.segment_starts[1:], len(t)], strict=True)
  ]
  spans = [list(range(own[0], own[-1] + 1)) for own in segments if own]
  steps = {
    "token": [[i] for i in sampled],
    "step_average": runs,
    "step_last": runs,
    "through_observations": [[i] for span in spans for i in span],
    "segments": [],
  }[config.gae]

  if config.gae == "segments":
    end_value = state_values[-1] if config.truncation == "bootstrap" and t.status.truncated else 0.0
    return plain_segments(config, segments, before, rewards, end_value, len(t))

  n = len(sampled) if config.gae == "through_observations" else len(steps)
  if config.lambda_length == "response":
    ends = [*t.segment_starts[1:], len(t)]
    n = sum(int(end) - own[0] for own, end in zip(segments, ends, strict=True) if own)
  lam = 1.0 - 1.0 / (config.alpha * n) if config.policy_lambda == "length_adaptive" else config.policy_lambda
  value_of = lambda step: before[step[-1]] if config.gae == "step_last" else np.mean([before[i] for i in step])

  out, next_value, following = np.zeros(len(t)), 0.0, 0.0
  for step in reversed(steps):
    reward = sum(rewards.get(i, 0.0) for i in step)
    following = reward + config.gamma * next_value - value_of(step) + config.gamma * lam * following
    next_value = value_of(step)
    out[step] = following
  return np.where(mask, out, 0.0)


def plain_segments(config: AlgorithmConfig, segments, before, rewards, end_value, length) -> np.ndarray:
  """A loop over segments, each with all that is still to be earned at its end, then less by what follows it."""
  out, counts = np.zeros(length), [len(own) for own in segments]
  for number, own in enumerate(segments):
    n = counts[number] if config.lambda_length == "segment" else sum(counts)
    lam = 1.0 - 1.0 / (config.alpha * n) if config.policy_lambda == "length_adaptive" else config.policy_lambda
    earned = {i: rewards[i] for i in own}
    earned[own[-1]] += end_value + sum(rewards[i] for later in segments[number + 1 :] for i in later)
    local, _ = algorithm_toy.gae_loop(
      [earned[i] for i in own], [before[i] for i in own], np.ones(len(own)), lam=lam, gamma=config.gamma
    )
    out[own] = (config.gamma * lam) ** sum(counts[number + 1 :]) * local
  return out


@functools.cache
def compiled(config: AlgorithmConfig):
  return jax.jit(functools.partial(sao_advantages, config))


VARIANTS = [
  {"gae": "step_average", "gamma": 0.9},
  {"gae": "step_last"},
  {"gae": "step_last", "policy_lambda": 0.95},
  {"gae": "through_observations"},
  {"gae": "through_observations", "lambda_length": "response"},
  {"gae": "step_average", "lambda_length": "response"},
  {"lambda_length": "response", "gamma": 0.9},
  {"gae": "segments", "gamma": 0.9, "truncation": "bootstrap"},
  {"gae": "segments", "lambda_length": "segment"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
def test_trajectories_in_any_rows_equal_a_plain_loop(changes, seed, count):
  config = dataclasses.replace(CONFIG, **changes)
  rng = np.random.default_rng(seed)
  trajectories = [pieces_toy.random_trajectory(rng, index) for index in range(count)]
  batch = pieces_toy.lay_out_at_random(trajectories, rng, grouped=False)
  if batch.pieces is None:  # one program for all
    batch = batch.replace(pieces=pieces_toy.no_pieces())
  state_values = rng.normal(size=pieces_toy.SHAPE).astype(np.float32)
  got = compiled(config)(batch, state_values)

  # Trajectories come out of the rows in another order, and are told apart by their tokens.
  rows = batch.replace(rewards=np.asarray(got), behavior_logprobs=state_values)
  found = {one["token_ids"].tobytes(): one for one in unpack(rows)}
  for t in trajectories:
    one = found[t.token_ids.tobytes()]
    np.testing.assert_allclose(one["rewards"], plain_advantages(config, t, one["behavior_logprobs"]), atol=2e-5)


def test_step_last_teaches_the_critic_on_the_last_token_of_each_turn():
  toys = algorithm_toy.TOYS
  batch = algorithm_toy.pack([[t] for t in toys], 32)
  config = dataclasses.replace(CONFIG, gae="step_last")
  valued = np.asarray(valued_tokens(config, batch, trained_tokens(batch)))
  for row, t in enumerate(toys):
    mask = np.r_[t.action_mask, False]
    mask[0] = False
    np.testing.assert_array_equal(np.flatnonzero(valued[row]), np.flatnonzero(mask[:-1] & ~mask[1:]))

  # The loss is a mean over them: no other token's value changes it.
  step = make_train_step(config, algorithm_toy.POLICY, algorithm_toy.CRITIC, max_lag=3)
  _, metrics = step(algorithm_toy.train_state(), batch)
  values = np.asarray(algorithm_toy.value_apply(algorithm_toy.value_params(), batch))[..., 0]
  errors = [values[row, i - 1] - toys[row].reward for row, i in zip(*np.nonzero(valued), strict=True)]
  np.testing.assert_allclose(metrics["value_loss_first"], np.mean(np.square(errors)), rtol=1e-5)
