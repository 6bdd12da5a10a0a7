"""Every number that a train step reports under its name, against plain Python on tokens of known ratios."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from toys.algorithm_toy import Toy, pack

from sao_jax.algorithm import diagnostics
from sao_jax.algorithm.network import Update
from sao_jax.config import AlgorithmConfig
from sao_jax.types import PolicyOutputs

CONFIG = AlgorithmConfig(epsilon_low=0.3, epsilon_high=5.0)
RATIOS = [0.5, 0.9, 1.0, 2.0, 7.0, 8.0, 9.0]  # one is too low, three are too high


def episode(mask, reward=0.0, **changes):
  mask = np.array(mask, bool)
  size = len(mask)
  return Toy(np.arange(size, dtype=np.int32) % 7, mask, np.where(mask, -1.0, np.nan), np.zeros(size), reward, **changes)


def test_counts_of_a_batch():
  untrained = np.zeros(4, bool)
  toys = [
    episode([0, 1, 1, 0, 1], 1.0),
    episode([0, 1], 0.5, truncated=True),
    episode([0, 1, 1, 0], loss_mask=untrained),
  ]
  batch = pack([toys[:2], toys[2:]], 12)
  sampled, trained = batch.action_mask, batch.action_mask & batch.loss_mask
  found = diagnostics.batch_metrics(batch, sampled, trained)
  assert {name: float(value) for name, value in found.items()} == {
    "num_tokens": 11,
    "num_sampled_tokens": 6,
    "num_trained_tokens": 4,
    "num_trajectories": 3,
    "num_truncated": 1,
    "num_untrained": 1,
    "reward_mean": 0.5,
  }


def test_figures_of_the_policy():
  """Seven trained tokens of known ratios, behind a sampled one outside the losses, whose numbers must not enter."""
  toy = episode([0] + [1] * 8, loss_mask=np.array([0, 0] + [1] * 7, bool))
  batch = pack([[toy]], 9)
  trained = batch.action_mask & batch.loss_mask
  padded = lambda values: jnp.array([[0.0, 50.0, *values]], jnp.float32)
  outputs = PolicyOutputs(padded(np.log(RATIOS) - 1.0), padded([0.1 * i for i in range(7)]))
  update = Update(jnp.float32(1.5), jnp.float32(2.5), jnp.array(False))
  advantages = padded([1, 2, 3, 4, 5, 6, 7.5])
  lags = jnp.array([[0, 9, 0, 0, 0, 1, 1, 2, 2]], jnp.int32)
  found = diagnostics.policy_metrics(CONFIG, update, outputs, batch, trained, advantages, advantages, lags)
  by_lag = np.asarray(found.pop("delta_logprob_by_lag"))

  values, weights = [1, 2, 3, 4, 5, 6, 7.5], [ratio if 0.7 < ratio < 6.0 else 0.0 for ratio in RATIOS]
  deltas = [abs(math.log(ratio)) for ratio in RATIOS]
  expected = {
    "policy_loss": 1.5,
    "policy_grad_norm": 2.5,
    "policy_updates_skipped": 1,
    "advantage_mean": np.mean(values),
    "advantage_std": np.std(values),
    "entropy": 0.3,
    "rejected_low": 1 / 7,
    "rejected_high": 3 / 7,
    "effective_sample_size": sum(weights) ** 2 / (7 * sum(weight**2 for weight in weights)),
    "delta_logprob": np.mean(deltas),
    "ratio_p01": 0.5,
    "ratio_p05": 0.5,
    "ratio_p50": 2.0,
    "ratio_p95": 9.0,
    "ratio_p99": 9.0,
  }
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
  np.testing.assert_allclose(by_lag[:3], [np.mean(deltas[:3]), np.mean(deltas[3:5]), np.mean(deltas[5:])], rtol=1e-5)
  assert np.isnan(by_lag[3:]).all()


@pytest.mark.parametrize("head, clipped", [("scalar", 0.0), ("hl_gauss", 0.5)])
def test_figures_of_the_critic(head, clipped):
  config = AlgorithmConfig(value_head=head, value_min=0.0, value_max=1.0)
  updates = Update(jnp.array([3.0, 2.0, 1.0]), jnp.array([1.0, 2.0, 6.0]), jnp.array([True, False, True]))
  values, targets = jnp.array([[0.5, 0.5, 0.5, 9.0]]), jnp.array([[0.0, 1.0, 0.0, -4.0]])
  trained = jnp.array([[True, True, True, False]])
  if clipped:
    targets = jnp.array([[0.0, 2.0, 0.5, -1.0]])
    trained = jnp.ones((1, 4), bool)
  found = diagnostics.critic_metrics(config, updates, values, targets, trained)
  kept = [(float(v), float(t)) for v, t, m in zip(values[0], targets[0], trained[0]) if m]
  spread, rest = np.var([t for _, t in kept]), np.var([t - v for v, t in kept])
  expected = {
    "value_loss_first": 3.0,
    "value_loss_last": 1.0,
    "critic_grad_norm": 3.0,
    "critic_updates_skipped": 1,
    "explained_variance": 1 - rest / spread,
    "value_targets_clipped": clipped,
  }
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
