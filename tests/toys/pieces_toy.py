"""Trajectories of many segments in rows that do not hold them, table networks, and a plain loop over trajectories."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sao_jax.algorithm.network import Network
from sao_jax.algorithm.train_step import init_train_state
from sao_jax.config import AlgorithmConfig
from sao_jax.episode import PromptKey, Status, Trajectory
from sao_jax.learner.packing import lay_out
from sao_jax.learner.row_plan import Part, RowPlan
from sao_jax.types import Pieces, PolicyOutputs, TrajectoryBatch

VOCABULARY, VERSION = 9, 2
SHAPE = (24, 12)  # rows of which none holds a whole trajectory


def random_trajectory(rng: np.random.Generator, rollout_id: int) -> Trajectory:
  """One to five segments of at most 12 tokens: a prompt, and one or two turns, with observations."""
  mask, starts, turns = [], [], []
  for _ in range(rng.integers(1, 6)):
    starts.append(len(mask))
    mask += [0] * int(rng.integers(1, 3))
    for _ in range(rng.integers(1, 3)):
      turns.append(len(mask))
      mask += [1] * int(rng.integers(1, 4)) + [0] * int(rng.integers(0, 3))
  mask = np.array(mask, bool)

  rewards = rng.normal(size=len(turns)) * (rng.random(len(turns)) < 0.5)
  return Trajectory(
    token_ids=rng.integers(0, VOCABULARY, len(mask)).astype(np.int32),
    action_mask=mask,
    behavior_logprobs=np.where(mask, np.log(rng.uniform(0.02, 0.5, len(mask))), np.nan).astype(np.float32),
    policy_version=np.where(mask, rng.integers(0, 3, len(mask)), -1).astype(np.int32),
    turn_starts=np.array(turns, np.int32),
    segment_starts=np.array(starts, np.int32),
    reward=float(rewards.sum()),
    turn_rewards=rewards,
    status=Status.TERMINATED if rng.random() < 0.5 else Status.TRUNCATED_TURNS,
    key=PromptKey("pieces", rollout_id, 0),
    rollout_id=rollout_id,
    sample=rollout_id % 2,
    loss_mask=mask & (rng.random(len(mask)) < 0.8),
  )


def lay_out_at_random(trajectories: list[Trajectory], rng: np.random.Generator, **options) -> TrajectoryBatch:
  """Cuts the trajectories between any of their segments, and puts each part into any row that holds it."""
  parts = []
  for index, trajectory in enumerate(trajectories):
    bounds, begin = [*trajectory.segment_starts.tolist(), len(trajectory)], 0
    for start, stop in zip(bounds[1:], [*bounds[2:], None], strict=True):
      if stop is None or stop - begin > SHAPE[1] or rng.random() < 0.5:
        parts.append(Part(index, begin, start))
        begin = start
  rng.shuffle(parts)

  rows: list[list[Part]] = [[] for _ in range(SHAPE[0])]
  for part in (Part(*part) for part in parts):
    holds = [row for row in rows if sum(other.length for other in row) + part.length <= SHAPE[1]]
    holds[rng.integers(len(holds))].append(part)
  return lay_out(trajectories, RowPlan(SHAPE, rows), None, **options)


def no_pieces() -> Pieces:
  """A table of pieces without any, so that one program does for all batches."""
  return Pieces(np.zeros(SHAPE, np.int32), *np.zeros((3, 3 * SHAPE[0]), np.int32))


def policy_apply(params, batch):
  """A bigram table of logits."""
  logits = params["table"][batch.token_ids]
  logs = logits - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))
  logs = jnp.concatenate([jnp.zeros_like(logs[:, :1]), logs[:, :-1]], axis=1)
  chosen = jnp.take_along_axis(logs, batch.token_ids[..., None], axis=-1)[..., 0]
  valid = batch.positions > 0
  return PolicyOutputs(jnp.where(valid, chosen, 0.0), jnp.zeros_like(chosen))


def critic_apply(params, batch):
  """A value per token, and a slope over positions."""
  return (params["table"][batch.token_ids] + params["slope"] * batch.positions)[..., None]


# Plain gradient descent at rate 1: what a step subtracts is the gradient.
POLICY = Network(specs=None, apply=policy_apply, optimizer=optax.sgd(1.0))
CRITIC = Network(specs=None, apply=critic_apply, optimizer=optax.sgd(1.0))


def params(vocabulary: int = VOCABULARY) -> tuple[dict, dict]:
  rng = np.random.default_rng(7)
  policy = {"table": rng.normal(size=(vocabulary, vocabulary)).astype(np.float32)}
  return policy, {"table": rng.normal(size=vocabulary).astype(np.float32), "slope": np.float32(0.1)}


def train_state(vocabulary: int = VOCABULARY):
  policy, critic = jax.tree.map(jnp.asarray, params(vocabulary))
  return init_train_state(POLICY, CRITIC, policy, critic).replace(policy_version=jnp.asarray(VERSION, jnp.int32))


@dataclasses.dataclass(frozen=True)
class Expected:
  """Of each trajectory, and of the batch."""

  advantages: list[np.ndarray]  # of the sampled tokens of each trajectory
  targets: list[np.ndarray]
  metrics: dict[str, float]
  policy_gradient: np.ndarray
  table_gradient: np.ndarray
  slope_gradient: float


def plain_loop(config: AlgorithmConfig, trajectories: list[Trajectory], vocabulary: int = VOCABULARY) -> Expected:
  """Everything in double, one trajectory after the other, one token after the other."""
  policy, critic = params(vocabulary)
  logits = policy["table"].astype(np.float64)
  logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  of_mask = lambda t: t.trained & ~(config.truncation == "mask" and t.status.truncated)
  num_trained = sum(int(of_mask(t).sum()) for t in trajectories)

  all_advantages, all_targets, policy_loss, value_loss, num_untrained = [], [], 0.0, 0.0, 0
  policy_gradient, table_gradient, slope_gradient = np.zeros_like(logits), np.zeros(vocabulary), 0.0
  for t in trajectories:
    position = np.concatenate([np.arange(n) for n in np.diff([*t.segment_starts, len(t)])])
    state_values = critic["table"].astype(np.float64)[t.token_ids] + 0.1 * position
    sampled = np.flatnonzero(t.action_mask)
    end = state_values[-1] if t.status.truncated and config.truncation == "bootstrap" else 0.0

    # Rewards and returns, from the last sampled token to the first.
    rewards = dict.fromkeys(sampled.tolist(), 0.0)
    of_turns = [0.0] * (len(t.turn_starts) - 1) + [t.reward] if t.turn_rewards is None else t.turn_rewards
    for reward, next_start in zip(of_turns, [*t.turn_starts[1:], len(t)], strict=True):
      rewards[sampled[sampled < next_start].max()] += reward
    advantages, targets = {}, {}
    for lam, out in ((1.0 - 1.0 / (config.alpha * len(sampled)), advantages), (config.critic_lambda, targets)):
      next_value, following = end, 0.0
      for i in reversed(sampled.tolist()):
        value = state_values[i - 1]
        following = rewards[i] + config.gamma * next_value - value + config.gamma * lam * following
        next_value = value
        out[i] = following + (value if out is targets else 0.0)
    all_advantages.append(np.array([advantages[i] for i in sampled.tolist()]))
    all_targets.append(np.array([targets[i] for i in sampled.tolist()]))

    # Losses and gradients.
    trained = np.flatnonzero(of_mask(t)).tolist()
    num_untrained += not trained
    for i in trained:
      before, token = t.token_ids[i - 1], t.token_ids[i]
      ratio = np.exp(logs[before, token] - np.float64(t.behavior_logprobs[i]))
      weight = ratio if 1.0 - config.epsilon_low < ratio < 1.0 + config.epsilon_high else 0.0
      scale = -weight * advantages[i] / num_trained
      policy_loss += scale * logs[before, token]
      policy_gradient[before] -= scale * np.exp(logs[before])
      policy_gradient[before, token] += scale
      error = state_values[i - 1] - targets[i]
      value_loss += error**2 / num_trained
      table_gradient[before] += 2.0 * error / num_trained
      slope_gradient += 2.0 * error * position[i - 1] / num_trained

  metrics = {
    "num_trajectories": len(trajectories),
    "num_truncated": sum(t.status.truncated for t in trajectories),
    "num_untrained": num_untrained,
    "num_sampled_tokens": sum(t.num_sampled for t in trajectories),
    "num_trained_tokens": num_trained,
    "reward_mean": np.mean([t.reward for t in trajectories]),
    "policy_loss": policy_loss,
    "value_loss_first": value_loss,
  }
  return Expected(all_advantages, all_targets, metrics, policy_gradient, table_gradient, slope_gradient)


def assert_equal_to_plain_loop(config, trajectories, state, metrics, vocabulary: int = VOCABULARY):
  """Compares metrics, losses and gradients of a step that began at `train_state(vocabulary)`."""
  expected = plain_loop(config, trajectories, vocabulary)
  for name, value in expected.metrics.items():
    np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
  policy, critic = params(vocabulary)
  np.testing.assert_allclose(policy["table"] - state.policy.params["table"], expected.policy_gradient, atol=3e-6)
  np.testing.assert_allclose(critic["table"] - state.critic.params["table"], expected.table_gradient, atol=2e-5)
  np.testing.assert_allclose(critic["slope"] - state.critic.params["slope"], expected.slope_gradient, atol=1e-4)
