"""Staleness of a trajectory at consumption: the second stage, after admission.

The lag of a token is (version about to be updated) - (version that sampled it). It includes the time in the buffer, and
is never clamped: a negative lag is a fault of the version bookkeeping, and raised as one.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from sao_jax.types import Trajectory


def token_lags(trajectory: Trajectory, version: int) -> Int[np.ndarray, " n"]:
  """Lag of every sampled token when the step that updates `version` trains on it.

  Raises:
    RuntimeError: for a token from a version that does not exist yet.
  """
  lags = version - trajectory.policy_version[trajectory.action_mask]
  if len(lags) and lags.min() < 0:
    raise RuntimeError(
      f"rollout {trajectory.rollout_id} has tokens of version {version - lags.min()}, trained at {version}"
    )
  return lags


def is_stale(trajectory: Trajectory, version: int, max_staleness: int, staleness: str) -> bool:
  """Whether nothing of the trajectory may be trained on at `version`.

  "drop": its oldest sampled token is over age; "mask": all of them are. A negative `max_staleness` is no bound.
  """
  if max_staleness < 0:
    return False
  versions = trajectory.policy_version[trajectory.action_mask]
  decisive = versions.min() if staleness == "drop" else versions.max()
  return bool(version - decisive > max_staleness)


def mask_over_age(trajectory: Trajectory, version: int, max_staleness: int) -> Trajectory:
  """Turns over-age sampled tokens into context, and keeps the rest trainable.

  Versions never decrease along a trajectory, so these are its first tokens and the last sampled one stays. They become
  what observations are: mask False, log-prob NaN, version -1; a turn starts at its first token that is left.
  """
  over_age = trajectory.action_mask & (version - trajectory.policy_version > max_staleness)
  if max_staleness < 0 or not over_age.any():
    return trajectory
  mask = trajectory.action_mask & ~over_age
  ends = np.append(trajectory.turn_starts[1:], len(trajectory))
  left = [start + np.flatnonzero(mask[start:end]) for start, end in zip(trajectory.turn_starts, ends)]
  return dataclasses.replace(
    trajectory,
    action_mask=mask,
    behavior_logprobs=np.where(over_age, np.float32(np.nan), trajectory.behavior_logprobs),
    policy_version=np.where(over_age, np.int32(-1), trajectory.policy_version),
    turn_starts=np.asarray([turn[0] for turn in left if len(turn)], dtype=np.int32),
  )
