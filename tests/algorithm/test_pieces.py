"""Trajectories whose segments lie in several rows: the same numbers as a plain loop over whole trajectories."""

from __future__ import annotations

import dataclasses
import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from toys import pieces_toy as toy

from sao_jax.algorithm import pieces
from sao_jax.algorithm.advantage import sao_advantages, value_targets
from sao_jax.algorithm.grpo import grpo_advantages
from sao_jax.algorithm.tokens import sampled_tokens
from sao_jax.algorithm.train_step import make_train_step
from sao_jax.config import AlgorithmConfig
from sao_jax.learner.packing import lay_out, unpack
from sao_jax.learner.row_plan import plan_rows

CONFIG = AlgorithmConfig(
  gamma=0.9,
  critic_lambda=0.7,
  epsilon_low=0.8,
  truncation="bootstrap",
  whiten_advantages=False,
  advantage_values="pre",
  value_updates=1,
)
EMPTY = toy.no_pieces()


@functools.cache
def compiled(config: AlgorithmConfig, **options):
  return make_train_step(config, toy.POLICY, toy.CRITIC, **options)


def make_batch(seed: int, count: int, **options):
  """Random trajectories in random rows; always with a table of pieces, so that one program does for all."""
  rng = np.random.default_rng(seed)
  trajectories = [toy.random_trajectory(rng, index) for index in range(count)]
  batch = toy.lay_out_at_random(trajectories, rng, **{"grouped": False} | options)
  return trajectories, batch if batch.pieces is not None else batch.replace(pieces=EMPTY)


@hypothesis.given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_step_on_trajectories_in_any_rows_equals_a_plain_loop_over_trajectories(seed, count):
  """n, targets, advantages, losses, gradients, and figures that count every trajectory once."""
  trajectories, batch = make_batch(seed, count)
  state, metrics = compiled(CONFIG)(toy.train_state(), batch)
  toy.assert_equal_to_plain_loop(CONFIG, trajectories, state, metrics)


_advantages = jax.jit(sao_advantages, static_argnums=0)
_targets = jax.jit(value_targets, static_argnums=0)
_count = jax.jit(lambda batch: pieces.count_per_trajectory(batch, sampled_tokens(batch)))


def of_trajectories(batch, x):
  """`x` on the sampled tokens of each trajectory, in the order of the trajectory's tokens."""
  found = unpack(batch.replace(rewards=np.asarray(x)))
  return [one["rewards"][one["action_mask"]] for one in found]


def by_tokens(batch, x, trajectories):
  """The same, in the order of the trajectories, told apart by their tokens."""
  keys = [one["token_ids"].tobytes() for one in unpack(batch)]
  values = dict(zip(keys, of_trajectories(batch, x), strict=True))
  return [values[trajectory.token_ids.tobytes()] for trajectory in trajectories]


def test_advantages_and_targets_of_every_token():
  config = dataclasses.replace(CONFIG, truncation="zero")
  trajectories, batch = make_batch(11, 4)
  values = toy.critic_apply(toy.params()[1], batch)[..., 0]
  expected = toy.plain_loop(config, trajectories)
  for got, want in (
    (_advantages(config, batch, values), expected.advantages),
    (_targets(config, batch, values), expected.targets),
    (_count(batch), [np.full(t.num_sampled, t.num_sampled) for t in trajectories]),
  ):
    for ours, theirs in zip(by_tokens(batch, got, trajectories), want, strict=True):
      np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_the_target_is_exactly_the_reward_across_rows():
  """For γ = λ = 1 and a terminal reward, whatever the values are."""
  trajectories, batch = make_batch(3, 4)
  trajectories = [dataclasses.replace(t, turn_rewards=None, reward=0.1) for t in trajectories]
  batch = toy.lay_out_at_random(trajectories, np.random.default_rng(3), grouped=False)
  values = jnp.asarray(np.random.default_rng(0).normal(size=toy.SHAPE), jnp.float32)
  targets = _targets(AlgorithmConfig(), batch, values)
  assert set(np.asarray(targets)[batch.action_mask].tolist()) == {np.float32(0.1)}


@pytest.mark.parametrize("gamma, critic_lambda", [(0.0, 0.7), (0.9, 0.0)])
def test_the_ends_of_the_ranges(gamma, critic_lambda):
  config = dataclasses.replace(CONFIG, gamma=gamma, critic_lambda=critic_lambda)
  trajectories, batch = make_batch(5, 4)
  values = toy.critic_apply(toy.params()[1], batch)[..., 0]
  expected = toy.plain_loop(config, trajectories)
  for ours, theirs in zip(
    by_tokens(batch, _targets(config, batch, values), trajectories), expected.targets, strict=True
  ):
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_a_trajectory_in_several_rows_is_one_member_of_its_group():
  trajectories, batch = make_batch(2, 4, grouped=True)
  config = AlgorithmConfig(advantage="grpo")
  got = by_tokens(batch, jax.jit(grpo_advantages, static_argnums=0)(config, batch), trajectories)
  for first in (0, 2):
    rewards = np.array([t.reward for t in trajectories[first : first + 2]])
    expected = (rewards - rewards.mean()) / rewards.std(ddof=1)
    for index in (0, 1):
      np.testing.assert_allclose(got[first + index], expected[index], rtol=1e-4)


def test_a_table_without_pieces_changes_nothing():
  rng = np.random.default_rng(0)
  short = [t for t in (toy.random_trajectory(rng, index) for index in range(6)) if len(t) <= toy.SHAPE[1]]
  batch = lay_out(short, plan_rows(short, (toy.SHAPE[1],), (toy.SHAPE[0],)), None, grouped=False)
  assert short and batch.pieces is None
  toy.assert_equal_to_plain_loop(CONFIG, short, *compiled(CONFIG)(toy.train_state(), batch.replace(pieces=EMPTY)))


def test_rows_and_tokens_over_devices_change_nothing_and_no_row_moves():
  """Data, parameters and tokens over four devices, in two micro-batches: only numbers of pieces are gathered."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "context"))
  trajectories, batch = make_batch(17, 4)
  config = dataclasses.replace(CONFIG, micro_batches=2)
  sharding = lambda x: NamedSharding(mesh, PartitionSpec(*("fsdp", "context")[: x.ndim]))
  sharded = jax.tree.map(lambda x: jax.device_put(x, sharding(x)), batch)
  shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), toy.train_state())
  step = compiled.__wrapped__(config, state_shardings=shardings)
  state = jax.device_put(toy.train_state(), shardings)
  program = step.lower(state, sharded).compile()
  toy.assert_equal_to_plain_loop(config, trajectories, *program(state, sharded))

  gathered = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all)[-\w]*\(", program.as_text())
  assert {shape.partition(",")[0] for shape in gathered} == {str(3 * toy.SHAPE[0])}
