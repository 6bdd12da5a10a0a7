"""Toy networks, hand-made trajectories and plain-loop references for the tests of sao_jax.algorithm."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.algorithm.advantage import packed_returns
from sao_jax.algorithm.network import Network
from sao_jax.algorithm.optimizer import make_optimizer
from sao_jax.algorithm.train_step import init_train_state, make_train_step
from sao_jax.config import AlgorithmConfig, OptimizerConfig
from sao_jax.types import PolicyOutputs, TrainState, TrajectoryBatch

VOCABULARY, WIDTH = 7, 4
FROZEN = frozenset({"layers/attention/q", "layers/attention/q_norm"})


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
  """One hand-made trajectory; `versions` are those of its sampled tokens' policy."""

  token_ids: np.ndarray
  action_mask: np.ndarray
  behavior_logprobs: np.ndarray
  versions: np.ndarray
  reward: float
  truncated: bool = False
  loss_mask: np.ndarray | None = None  # None: all sampled tokens are trained


def random_toy(rng: np.random.Generator, mask: list[int] | None = None, **changes) -> Toy:
  """A random trajectory: prompt, action, observation, action, sometimes a trailing observation."""
  if mask is None:
    prompt, first, gap, second, tail = rng.integers([1, 1, 0, 0, 0], [3, 4, 3, 3, 2])
    mask = [0] * prompt + [1] * first + [0] * gap + [1] * second + [0] * tail
  mask = np.array(mask, bool)
  toy = Toy(
    token_ids=rng.integers(0, VOCABULARY, len(mask)).astype(np.int32),
    action_mask=mask,
    behavior_logprobs=np.where(mask, np.log(rng.uniform(0.05, 0.4, len(mask))), np.nan).astype(np.float32),
    versions=np.where(mask, rng.integers(0, 3, len(mask)), -1).astype(np.int32),
    reward=float(rng.integers(0, 2)),
  )
  return dataclasses.replace(toy, **changes)


def pack(rows: list[list[Toy]], length: int = 16) -> TrajectoryBatch:
  """Packs each list of trajectories into one row."""
  shape = (len(rows), length)
  batch = TrajectoryBatch(
    token_ids=np.zeros(shape, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    trajectory_ids=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    action_mask=np.zeros(shape, bool),
    loss_mask=np.zeros(shape, bool),
    behavior_logprobs=np.full(shape, np.nan, np.float32),
    policy_version=np.full(shape, -1, np.int32),
    rewards=np.zeros(shape, np.float32),
    truncated=np.zeros(shape, bool),
  )
  for row, toys in enumerate(rows):
    start = 0
    for segment, toy in enumerate(toys, 1):
      where = (row, slice(start, start + len(toy.token_ids)))
      batch.token_ids[where] = toy.token_ids
      batch.segment_ids[where] = batch.trajectory_ids[where] = segment
      batch.positions[where] = np.arange(len(toy.token_ids))
      batch.action_mask[where] = toy.action_mask
      batch.loss_mask[where] = toy.action_mask if toy.loss_mask is None else toy.loss_mask
      batch.behavior_logprobs[where] = toy.behavior_logprobs
      batch.policy_version[where] = toy.versions
      batch.truncated[where] = toy.truncated
      if toy.action_mask.any():
        batch.rewards[row, start + np.flatnonzero(toy.action_mask)[-1]] = toy.reward
      start += len(toy.token_ids)
  return jax.tree.map(jnp.asarray, batch)


def policy_params(seed: int = 0) -> dict:
  """A bigram policy."""
  a, b = jax.random.split(jax.random.key(seed))
  return {
    "embed": jax.random.normal(a, (VOCABULARY, WIDTH), jnp.float32),
    "head": 0.5 * jax.random.normal(b, (WIDTH, VOCABULARY), jnp.float32),
  }


def policy_apply(params: dict, batch: TrajectoryBatch) -> PolicyOutputs:
  """log π(token t | token t-1) and the entropy, 0 on first tokens of segments."""
  logits = jax.nn.log_softmax(params["embed"][batch.token_ids] @ params["head"])
  logits = jnp.concatenate([jnp.zeros_like(logits[:, :1]), logits[:, :-1]], axis=1)
  logprobs = jnp.take_along_axis(logits, batch.token_ids[..., None], axis=-1)[..., 0]
  entropy = -jnp.sum(jnp.exp(logits) * logits, axis=-1)
  valid = batch.positions > 0
  return PolicyOutputs(jnp.where(valid, logprobs, 0.0), jnp.where(valid, entropy, 0.0))


def value_params(seed: int = 1, outputs: int = 1) -> dict:
  """A value network of one token and its position, with leaves named like a transformer's."""
  keys = jax.random.split(jax.random.key(seed), 3)
  return {
    "embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH), jnp.float32),
    "layers": {
      "attention_norm": jnp.ones(WIDTH, jnp.float32),
      "attention": {
        "q": jax.random.normal(keys[1], (WIDTH, WIDTH), jnp.float32),
        "q_norm": jnp.ones(WIDTH, jnp.float32),
      },
    },
    "value_head": 0.3 * jax.random.normal(keys[2], (WIDTH, outputs), jnp.float32),
  }


def value_apply(params: dict, batch: TrajectoryBatch) -> jax.Array:
  """State-aligned outputs [B, T, O]: entry t has read token t."""
  x = params["embed"][batch.token_ids] + 0.1 * batch.positions[..., None]
  layers = params["layers"]
  x = jnp.tanh((x * layers["attention_norm"]) @ layers["attention"]["q"]) * layers["attention"]["q_norm"]
  return x @ params["value_head"]


POLICY_OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2))
VALUE_OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=2e-2, clip_norm=10.0), updates_per_step=2)


POLICY = Network(specs=None, apply=policy_apply, optimizer=POLICY_OPTIMIZER)
CRITIC = Network(specs=None, apply=value_apply, optimizer=VALUE_OPTIMIZER, frozen=FROZEN)


@functools.cache
def train_step(config: AlgorithmConfig, **options):
  """The compiled toy step, shared by all tests that use the same settings."""
  return make_train_step(config, POLICY, CRITIC, **{"max_lag": 3} | options)


def train_state(version: int = 2, outputs: int = 1):
  """A fresh toy state (fresh buffers: the step donates them)."""
  state = init_train_state(POLICY, CRITIC, policy_params(), value_params(outputs=outputs))
  return state.replace(policy_version=jnp.asarray(version, jnp.int32))


def packed_advantages(rewards, values, mask, trajectory_ids, **options):
  """A = G - V of one packed row, as the estimator forms it."""
  returns = packed_returns(rewards, values, mask, trajectory_ids, **options)
  return jnp.where(mask, returns - values, 0.0)


def gae_loop(rewards, values, mask, *, lam, gamma=1.0, bootstrap=0.0):
  """δ-form GAE over the sampled tokens of one trajectory, in double: (advantages, advantages + values)."""
  mask = np.asarray(mask, bool)
  advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
  next_value, next_advantage = float(bootstrap), 0.0
  for t in reversed(np.flatnonzero(mask)):
    delta = float(rewards[t]) + gamma * next_value - float(values[t])
    advantages[t] = next_advantage = delta + gamma * lam * next_advantage
    returns[t] = advantages[t] + float(values[t])
    next_value = float(values[t])
  return advantages, returns


# Every distinct config compiles for seconds: the tests share these.
CONFIG = AlgorithmConfig(epsilon_low=0.8, epsilon_high=5.0)
SINGLE = dataclasses.replace(CONFIG, advantage_values="pre", value_updates=1, whiten_advantages=False)


def make_toys(count=8, seed=0, **changes):
  rng = np.random.default_rng(seed)
  return [random_toy(rng, **changes) for _ in range(count)]


TOYS = make_toys()
SPREAD = [[t] for t in TOYS]  # one trajectory per row
PAIRS = [[TOYS[i], TOYS[7 - i]] for i in range(4)]


def run(config=CONFIG, rows=SPREAD, length=32, state=None, **options):
  batch = rows if not isinstance(rows, list) else pack(rows, length)
  return train_step(config, **options)(state or train_state(), batch)


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
