"""Staleness of a trajectory at consumption: the second stage, after admission.

The lag of a token is (version about to be updated) - (version that sampled it). It includes the time in the buffer, and
is never clamped: a negative lag is a fault of the version bookkeeping, and raised as one.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int

from sao_jax.episode import Trajectory


def token_lags(trajectory: Trajectory, version: int) -> Int[np.ndarray, " n"]:
  """Lag of every token that the step which updates `version` trains on.

  Raises:
    RuntimeError: for a token from a version that does not exist yet.
  """
  lags = version - trajectory.policy_version[trajectory.trained]
  if len(lags) and lags.min() < 0:
    raise RuntimeError(
      f"rollout {trajectory.rollout_id} has tokens of version {version - lags.min()}, trained at {version}"
    )
  return lags


def decisive_version(trajectory: Trajectory, staleness: str) -> int:
  """Returns the policy version that a trajectory's age is measured from.

  "drop": its oldest sampled token's, since one over-age token is too many; "mask": its youngest one's.
  """
  versions = trajectory.policy_version[trajectory.action_mask]
  return int(versions.min() if staleness == "drop" else versions.max())


def is_stale(decisive: int, version: int, max_staleness: int) -> bool:
  """Returns whether nothing of a trajectory may be trained on at `version`; a negative `max_staleness` is no bound."""
  return 0 <= max_staleness < version - decisive


def mask_over_age(trajectory: Trajectory, version: int, max_staleness: int) -> Trajectory:
  """Takes over-age sampled tokens out of the losses, and out of nothing else.

  They stay sampled tokens: they count for n, hence for λ, and the advantages of the others run over them. Versions
  never decrease along a trajectory, so these are its first tokens.
  """
  over_age = trajectory.action_mask & (version - trajectory.policy_version > max_staleness)
  if max_staleness < 0 or not over_age.any():
    return trajectory
  return dataclasses.replace(trajectory, loss_mask=trajectory.trained & ~over_age)


def mask_all(trajectory: Trajectory) -> Trajectory:
  """Takes a trajectory out of the losses as a whole."""
  return dataclasses.replace(trajectory, loss_mask=np.zeros(len(trajectory), dtype=np.bool_))
