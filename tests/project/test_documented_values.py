"""Numbers of the paper and of known faults that no other test pins: defaults, worked examples, alignment, positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import algorithm_toy, training_toy
from toys.trajectories import make_trajectories

from sao_jax.algorithm.advantage import packed_returns, skip_observation_gae
from sao_jax.algorithm.policy_loss import dis_policy_loss
from sao_jax.algorithm.tokens import trained_tokens
from sao_jax.config import (
  AlgorithmConfig,
  OptimizerConfig,
  RolloutConfig,
  RunConfig,
  SamplerConfig,
  ValuePretrainingConfig,
)
from sao_jax.episode import PromptKey, Status, Trajectory
from sao_jax.learner.packing import pack
from sao_jax.models.logprobs import token_logprobs
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.rope import rope_table
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params
from sao_jax.types import TrajectoryBatch


def test_defaults_are_the_papers():
  algorithm, rollout, sampler = AlgorithmConfig(), RolloutConfig(), SamplerConfig()
  assert (algorithm.epsilon_low, algorithm.epsilon_high) == (0.3, 5.0)
  assert (algorithm.gamma, algorithm.alpha, algorithm.critic_lambda) == (1.0, 1.5, 1.0)
  assert (algorithm.value_updates, algorithm.critic_warmup_steps) == (2, 10)
  assert algorithm.advantage_values == "post" and algorithm.truncation == "zero"
  assert algorithm.freeze_attention and not (algorithm.freeze_router or algorithm.freeze_embeddings)
  assert algorithm.value_clip == 0.0 and algorithm.value_head == "scalar"
  assert rollout.batch_size == 128
  # Ours: the paper discloses no bound. One of at least four times the mean lag hardly biases the lengths.
  assert (rollout.admission_staleness, rollout.max_staleness, rollout.staleness) == (4, 16, "drop")
  assert (rollout.max_tokens, rollout.max_turns) == (
    128 * 1024,
    50,
  )  # turns: of math; the paper's coding agents have 300
  assert (sampler.temperature, sampler.top_p, sampler.top_k, sampler.kv_after_publish) == (1.0, 1.0, 0, "keep")
  assert ValuePretrainingConfig().min_steps == 50
  run = RunConfig(environment=None)
  policy, critic = run.policy_optimizer, run.critic_optimizer
  assert (policy.learning_rate, critic.learning_rate) == (1e-6, 5e-6)
  assert (policy.clip_norm, critic.clip_norm) == (1.0, 10.0)
  assert (critic.warmup_steps, policy.warmup_steps) == (10, 0)
  assert (OptimizerConfig().b1, OptimizerConfig().b2, OptimizerConfig().weight_decay) == (0.9, 0.98, 0.1)


def test_the_denominator_counts_rejected_tokens():
  ratios = jnp.array([0.7, 0.8, 2.0, 6.0], jnp.float32)
  # The gradient by log pi of each token is -coefficient / N.
  gradient = jax.grad(
    lambda logprobs: (
      dis_policy_loss(logprobs, jnp.zeros(4), jnp.ones(4), jnp.ones(4, bool), epsilon_low=0.3, epsilon_high=5.0).sum()
      / 4
    )
  )(jnp.log(ratios))
  assert float(-gradient.sum()) == pytest.approx(0.7)  # 2.8 / 4, not 2.8 / 2 = 1.4
  np.testing.assert_allclose(-gradient, [0, 0.2, 0.5, 0], atol=1e-6)


def test_returns_of_the_worked_example_and_the_wrong_ways_to_compute_it():
  mask = jnp.array([1, 1, 0, 0, 1], bool)
  values = jnp.array([0.5, 0.6, 9.0, 9.0, 0.7], jnp.float32)
  rewards = jnp.array([0, 0, 0, 0, 1], jnp.float32)
  zeros, ones = jnp.zeros(5, jnp.float32), jnp.ones(5, jnp.int32)
  returns = packed_returns(rewards, values, mask, ones, one_minus_lam=zeros)
  np.testing.assert_array_equal(returns, [1, 1, 0, 0, 1])
  advantages = skip_observation_gae(rewards, values, mask, lam=7 / 9)
  np.testing.assert_allclose(advantages, [0.359259, 0.333333, 0, 0, 0.3], atol=1e-6)
  through = skip_observation_gae(rewards, values, jnp.ones(5, bool), lam=7 / 9)  # GAE through observations
  np.testing.assert_allclose(through[:2], [2.838, 3.520], atol=5e-4)
  turns = jnp.array([1, 1, 1, 1, 2], jnp.int32)  # restarted per turn
  per_turn = algorithm_toy.packed_advantages(rewards, values, mask, turns, one_minus_lam=zeros + 2 / 9)
  np.testing.assert_allclose(per_turn, [-0.367, -0.6, 0, 0, 0.3], atol=5e-4)


def test_a_cap_on_lambda_would_hide_the_reward_of_long_trajectories():
  n = 30_000
  rewards = jnp.zeros(n, jnp.float32).at[-1].set(1.0)
  first = lambda lam: float(skip_observation_gae(rewards, jnp.zeros(n), jnp.ones(n, bool), lam=lam)[0])
  assert first(1 - 1 / (1.5 * n)) == pytest.approx(0.5134, abs=1e-3)
  assert first(0.999) < 1e-12


def test_alignment_of_log_probs():
  """ids [0,1,2] under logits rows [0,0,0], [0,0,ln 2], [5,0,0]: entry t belongs to token t, entry 0 to nobody."""
  head = np.array([[0, 0, 0], [0, 0, np.log(2)], [5, 0, 0]], np.float32)
  config = training_toy.replace(training_toy.get_config(), model={"vocab_size": 3, "d_model": 3}).model
  hidden = jnp.eye(3, dtype=jnp.float32)[None]
  ids, segments = jnp.array([[0, 1, 2]], jnp.int32), jnp.ones((1, 3), jnp.int32)
  logprobs, _ = token_logprobs({"head": jnp.asarray(head)}, config, hidden, ids, segments)
  np.testing.assert_allclose(logprobs[0], [0, -1.0986, -0.6931], atol=1e-4)
  twice, _ = token_logprobs(
    {"head": jnp.asarray(head)},
    config,
    jnp.concatenate([hidden, hidden], axis=1),
    jnp.concatenate([ids, ids], axis=1),
    jnp.array([[1, 1, 1, 2, 2, 2]], jnp.int32),
  )
  np.testing.assert_allclose(twice[0], [0, -1.0986, -0.6931, 0, -1.0986, -0.6931], atol=1e-4)


def trajectory(ids, mask, rollout_id=0):
  mask = np.array(mask, bool)
  return Trajectory(
    token_ids=np.array(ids, np.int32),
    action_mask=mask,
    behavior_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
    policy_version=np.where(mask, 0, -1).astype(np.int32),
    turn_starts=np.flatnonzero(mask)[:1].astype(np.int32),
    reward=1.0,
    status=Status.TERMINATED,
    key=PromptKey("x", rollout_id, 0),
    rollout_id=rollout_id,
  )


def test_positions_restart_with_every_packed_trajectory():
  batch = pack([trajectory([5, 6, 7], [0, 1, 1]), trajectory([8, 9], [0, 1], 1)], (5,), (1,))
  assert batch.segment_ids[0].tolist() == [1, 1, 1, 2, 2]
  assert batch.positions[0].tolist() == [0, 1, 2, 0, 1]


def test_padding_is_never_inferred_from_ids():
  """The end-of-turn id equals the padding id, and the padding's neighbour is a real token all the same."""
  batch = pack([trajectory([21, 22, 0], [0, 1, 1])], (5,), (1,))
  assert batch.token_ids[0].tolist() == [21, 22, 0, 0, 0]
  assert (batch.segment_ids[0] > 0).tolist() == [True, True, True, False, False]
  assert batch.action_mask[0].tolist() == [False, True, True, False, False]
  assert np.isfinite(batch.behavior_logprobs[0]).tolist() == [False, True, True, False, False]


@pytest.fixture(scope="module")
def policy_logprobs():
  """Log-probs of packed rows under a random toy policy."""
  model = training_toy.replace(training_toy.get_config(), model={"initializer_range": 0.5}).model
  params = init_params(param_specs(model), jax.random.key(0))
  apply = jax.jit(make_policy_apply(model))
  return lambda batch: np.asarray(apply(params, jax.tree.map(jnp.asarray, batch)).logprobs)


def test_positions_of_a_row_that_is_padded_on_the_left(policy_logprobs):
  """Attention [0,0,1,1,1] has positions [0,0,0,1,2]; the sequence then has the log-probs that it has as we pack it."""
  packed = pack([trajectory([5, 6, 7], [0, 1, 1])], (5,), (1,))
  assert packed.segment_ids.tolist() == [[1, 1, 1, 0, 0]] and packed.positions.tolist() == [[0, 1, 2, 0, 0]]
  left = jax.tree.map(lambda rows: np.roll(rows, 2, axis=1), packed)
  assert left.segment_ids.tolist() == [[0, 0, 1, 1, 1]] and left.positions.tolist() == [[0, 0, 0, 1, 2]]
  expected = policy_logprobs(packed)[0, :3]
  assert np.abs(expected[1:]).min() > 1e-3
  np.testing.assert_allclose(policy_logprobs(left)[0], [0, 0, *expected], atol=1e-5)
  misplaced = left.replace(positions=np.array([[0, 1, 2, 2, 2]], np.int32))
  assert np.abs(policy_logprobs(misplaced)[0, 3:] - expected[1:]).max() > 1e-3


def test_masks_are_not_inferred_from_a_padding_id_that_ends_turns(policy_logprobs):
  """[21,22,9,9,9] where 9 pads and ends turns: three tokens are there, two of them sampled."""
  packed = pack([trajectory([21, 22, 9], [0, 1, 1])], (5,), (1,))
  batch: TrajectoryBatch = packed.replace(token_ids=np.where(packed.segment_ids > 0, packed.token_ids, np.int32(9)))
  assert batch.token_ids.tolist() == [[21, 22, 9, 9, 9]]
  assert (batch.segment_ids > 0).astype(int).tolist() == [[1, 1, 1, 0, 0]]
  trained = trained_tokens(jax.tree.map(jnp.asarray, batch), "zero")
  assert trained.astype(int).tolist() == [[0, 1, 1, 0, 0]]
  logprobs = policy_logprobs(batch)
  assert (logprobs < 0).astype(int).tolist() == [[0, 1, 1, 0, 0]]
  np.testing.assert_array_equal(logprobs, policy_logprobs(packed))


def test_rope_angles_are_fp32():
  """In bf16 the inverse frequencies would be off by 37.8 rad at position 32768 (theta 1e6, d = 128)."""
  position, theta, dim = 32_768, 1e6, 128
  exact = position * theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
  table = rope_table(jnp.full((1, 2), position, jnp.int32), dim, theta)
  cos, sin = (np.asarray(part, np.float64)[0, 0].reshape(-1)[: dim // 2] for part in table)
  np.testing.assert_allclose(cos, np.cos(exact), atol=5e-3)
  np.testing.assert_allclose(sin, np.sin(exact), atol=5e-3)
  inverse = jnp.asarray(theta ** -(np.arange(0, dim, 2) / dim), jnp.bfloat16)
  assert np.abs(position * np.asarray(inverse, np.float64) - exact).max() == pytest.approx(37.8, abs=0.1)


def test_all_log_probs_are_at_most_zero():
  assert all(t.num_sampled for t in make_trajectories())
  config = training_toy.replace(training_toy.get_config(), model={"vocab_size": 2, "d_model": 2}).model
  head = jnp.array([[20.0, 19.9], [20.0, 19.9]], jnp.float32)
  hidden = jnp.array([[[1.0, 0.0], [1.0, 0.0]]], jnp.float32)
  logprobs, _ = token_logprobs(
    {"head": head}, config, hidden, jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), jnp.int32)
  )
  assert float(logprobs[0, 1]) == pytest.approx(-0.64440, abs=1e-5)  # bf16 gives -0.63260
