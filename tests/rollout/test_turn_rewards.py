"""Rewards per turn: each on the last sampled token of its turn, and the return is their sum."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from toys.algorithm_toy import gae_loop
from toys.rewriting import Rewriting, play
from toys.rollout_fakes import STOP, VOCAB_SIZE, FakeEnvironment, FakeSampler, completion, make_trajectory, prompt

from sao_jax.algorithm.advantage import length_adaptive_lambda, sao_advantages, value_targets
from sao_jax.algorithm.grpo import grpo_advantages
from sao_jax.algorithm.tokens import sampled_tokens
from sao_jax.config import AlgorithmConfig
from sao_jax.environments.base import StepResult
from sao_jax.episode import GraderFailure, Status
from sao_jax.learner.packing import pack
from sao_jax.rollout.builder import TrajectoryBuilder
from sao_jax.rollout.evidence import check_trajectory
from sao_jax.rollout.outcomes import BadEvidence
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.rollout.serialization import trajectories_from_state, trajectories_to_state

LIMITS = EpisodeLimits(9, 1000, 50, context_length=1000, trajectory_length=10**6, vocab_size=VOCAB_SIZE)


class Paying(FakeEnvironment):
  """Answers every turn with two tokens and the next of `rewards`, the last of which ends the episode."""

  def __init__(self, *rewards):
    super().__init__()
    self.rewards = list(rewards)

  async def step(self, action_ids):
    reward = self.rewards.pop(0)
    return StepResult([5, 5], not self.rewards, reward)


def run(environment, **limits):
  sampler = FakeSampler(reply=lambda request: completion([7, STOP][: request.max_tokens], stop_ids=request.stop_ids))
  limits = dataclasses.replace(LIMITS, **limits)
  coroutine = run_episode(environment, prompt(), sampler.generate, 0, limits, session_id=sampler.new_session())
  return asyncio.run(coroutine)


def test_each_reward_stands_on_the_last_sampled_token_of_its_turn_and_the_return_is_their_sum():
  trajectory = run(Paying(0.5, None, -2, np.float32(1.25)))
  assert (trajectory.reward, trajectory.status) == (-0.25, Status.TERMINATED)
  assert trajectory.turn_rewards.tolist() == [0.5, 0, -2, 1.25]
  # Prompt 4; then two sampled tokens and two observed ones, four times.
  assert trajectory.token_rewards.tolist() == [*[0] * 4, *[0, 0.5, 0, 0], *[0] * 4, *[0, -2, 0, 0], *[0, 1.25, 0, 0]]
  batch = pack([trajectory], (32,), (1,))
  assert batch.rewards[0, :20].tolist() == trajectory.token_rewards.tolist() and not batch.rewards[0, 20:].any()
  check_trajectory(trajectory)


def test_a_terminal_reward_alone_is_stored_as_it_always_was():
  trajectory = run(Paying(None, 0.0, 1.0))
  assert trajectory.turn_rewards is None and trajectory.reward == 1.0
  assert np.flatnonzero(trajectory.token_rewards).tolist() == [13]


@pytest.mark.parametrize("rewards, status", [((0.5, 0.25), Status.TRUNCATED_TURNS), ((0.5,), Status.TRUNCATED_LENGTH)])
def test_an_episode_that_is_cut_keeps_its_rewards_and_its_grade_is_added(rewards, status):
  """`FakeEnvironment` grades what was cut with .25; a second turn that is cut was not answered by a step."""
  limits = {"max_turns": 2} if status is Status.TRUNCATED_TURNS else {"max_tokens": 3}
  trajectory = run(Paying(*rewards, 9.0, 9.0), **limits)
  assert trajectory.status is status and trajectory.reward == sum(rewards) + 0.25
  assert trajectory.turn_rewards.tolist() == [0.5, sum(rewards[1:]) + 0.25]


@pytest.mark.parametrize("reward", [np.nan, np.inf, "1", True, [1.0]])
def test_a_reward_of_any_turn_that_is_no_finite_number_is_a_failure_of_the_grader(reward):
  with pytest.raises(GraderFailure, match="one finite number"):
    run(Paying(reward, 1.0))


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"reward": 1e39}, "reward not finite"),  # in fp32
    ({"turn_rewards": np.array([1.0])}, "turn rewards of another length"),
    ({"turn_rewards": np.array([np.nan, 1.0])}, "reward not finite"),
    ({"turn_rewards": np.array([0.5, 1.0])}, "turn rewards do not add up"),
  ],
)
def test_wrong_rewards_are_bad_evidence(change, reason):
  with pytest.raises(BadEvidence) as error:
    check_trajectory(dataclasses.replace(make_trajectory(reward=1.0), **change))
  assert error.value.reason == reason


def test_a_reward_needs_an_action():
  with pytest.raises(ValueError, match="a reward needs an action"):
    TrajectoryBuilder(prompt().key, 0).add_reward(1.0)


def test_rewards_survive_a_checkpoint_and_states_without_them_stay_readable():
  rewarded, plain = run(Paying(0.1, 0.2, 0.3)), run(Paying(None, 1.0))
  records, arrays = trajectories_to_state([rewarded, plain])
  records = json.loads(json.dumps(records))
  first, second = trajectories_from_state(records, arrays)
  assert first.turn_rewards.tolist() == [0.1, 0.2, 0.3] and first.reward == rewarded.reward
  assert second.turn_rewards is None

  before = [{name: value for name, value in record.items() if name != "turn_rewards"} for record in records]
  assert [t.turn_rewards for t in trajectories_from_state(before, arrays)] == [None, None]


class PayingRewriting(Rewriting):
  """Rewards every turn, and begins a new segment after every second one."""

  async def step(self, action_ids):
    result = await super().step(action_ids)
    return dataclasses.replace(result, reward=0.5 - 0.2 * self.count)


@pytest.mark.parametrize("truncation", ["zero", "bootstrap"])
def test_advantages_and_targets_equal_a_plain_loop_with_rewards_per_turn(truncation):
  """With λ, γ < 1, observations, several segments, and an episode that was cut beside one that ended."""
  config = AlgorithmConfig(truncation=truncation, gamma=0.9, critic_lambda=0.7)
  ended = play(PayingRewriting(turns=5), [9, 9, STOP])[1]
  cut = dataclasses.replace(play(PayingRewriting(turns=9), [9, STOP], max_turns=6)[1], rollout_id=6)
  assert (ended.turn_rewards != 0).all() and len(ended.segment_starts) == 3 and cut.status is Status.TRUNCATED_TURNS
  batch = pack([ended, cut], (64,), (1,))
  state_values = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64)), jnp.float32)
  advantages, targets = sao_advantages(config, batch, state_values), value_targets(config, batch, state_values)

  for trajectory in (ended, cut):
    at = np.flatnonzero((batch.trajectory_ids[0] > 0) & (batch.truncated[0] == (trajectory is cut)))
    mask = np.asarray(sampled_tokens(batch))[0, at]
    values, bootstrap = np.asarray(state_values)[0, at - 1], 0.0
    if trajectory is cut and truncation == "bootstrap":
      bootstrap = float(state_values[0, at[-1]])
    rewards = np.zeros(len(at))
    for start, reward in zip(trajectory.turn_starts, trajectory.turn_rewards, strict=True):
      end = start
      while end < len(at) and trajectory.action_mask[end]:
        end += 1
      rewards[end - 1] = reward
    lam = float(length_adaptive_lambda(trajectory.num_sampled, config.alpha))
    expected, _ = gae_loop(rewards, values, mask, lam=lam, gamma=0.9, bootstrap=bootstrap)
    np.testing.assert_allclose(np.asarray(advantages)[0, at], expected, atol=1e-5)
    _, expected = gae_loop(rewards, values, mask, lam=0.7, gamma=0.9, bootstrap=bootstrap)
    np.testing.assert_allclose(np.asarray(targets)[0, at], expected, atol=1e-5)


def test_a_group_compares_returns():
  """Returns of 1 and 3, whichever turns they come from: the advantages of two terminal rewards 1 and 3."""
  first, second = run(Paying(0.25, 0.75)), dataclasses.replace(run(Paying(2.0, 1.0)), rollout_id=1, sample=1)
  batch = pack([first, second], (64,), (1,), grouped=True)
  advantages = np.asarray(grpo_advantages(AlgorithmConfig(advantage="grpo"), batch))
  assert sorted({round(float(a), 3) for a in advantages[batch.action_mask]}) == [-0.707, 0.707]
