"""Random trajectories of two turns each."""

from __future__ import annotations

import numpy as np

from sao_jax.episode import PromptKey, Status, Trajectory
from toys import training_toy


def make_trajectories():
  rng = np.random.default_rng(0)
  trajectories = []
  for rollout_id in range(24):
    mask = np.array([0, 0] + [1] * int(rng.integers(1, 6)) + [0, 0] + [1] * int(rng.integers(1, 6)), bool)
    length = len(mask)
    trajectories.append(
      Trajectory(
        token_ids=rng.integers(0, training_toy.VOCABULARY, length).astype(np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -3.5 + 0.3 * rng.standard_normal(length), np.nan).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turn_starts=np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1).astype(np.int32),
        reward=float(rng.integers(0, 2)),
        status=Status.TERMINATED,
        key=PromptKey("parity", rollout_id, 0),
        rollout_id=rollout_id,
      )
    )
  return trajectories
