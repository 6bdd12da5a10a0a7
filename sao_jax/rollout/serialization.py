"""Trajectories to plain JSON values and numpy arrays, and back: nothing is pickled."""

from __future__ import annotations

from typing import Any

import numpy as np

from sao_jax.episode import PromptKey, Status, Trajectory

TOKEN_FIELDS = {
  "token_ids": np.int32,
  "action_mask": np.bool_,
  "trained": np.bool_,
  "behavior_logprobs": np.float32,
  "policy_version": np.int32,
}

EXPERTS = "routed_experts"  # of those trajectories that have any


def trajectories_to_state(trajectories: list[Trajectory]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
  """Returns (one JSON record per trajectory, arrays [total tokens] of all of them, one behind the other).

  Without trajectories there are no arrays at all, for checkpoint formats that refuse empty ones.
  """
  # Small facts go into a record each.
  records = [
    {
      "length": len(trajectory),
      "turn_starts": trajectory.turn_starts.tolist(),
      "segment_starts": np.flatnonzero(trajectory.begins).tolist(),
      "reward": float(trajectory.reward),
      "status": trajectory.status.value,
      "key": list(trajectory.key),
      "rollout_id": trajectory.rollout_id,
      "info": {name: float(value) for name, value in trajectory.info.items()},
      "routed": trajectory.routed_experts is not None,
      "sample": trajectory.sample,
    }
    | ({} if trajectory.turn_rewards is None else {"turn_rewards": trajectory.turn_rewards.tolist()})
    | ({} if trajectory.baseline is None else {"baseline": trajectory.baseline})
    for trajectory in trajectories
  ]
  if not trajectories:
    return records, {}

  # Tokens of all trajectories go into one array a field: few arrays, however many trajectories.
  arrays = {name: np.concatenate([getattr(t, name) for t in trajectories]) for name in TOKEN_FIELDS}
  routed = [trajectory.routed_experts for trajectory in trajectories if trajectory.routed_experts is not None]
  if routed:
    arrays[EXPERTS] = np.concatenate(routed)
  return records, arrays


def trajectories_from_state(records: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> list[Trajectory]:
  """Inverts `trajectories_to_state`, bit for bit."""
  trajectories, start, routed = [], 0, 0  # where the next trajectory's tokens, and its experts, begin
  for record in records:
    end = start + record["length"]

    # Its part of every array.
    tokens = {name: np.asarray(arrays[name][start:end], dtype=dtype) for name, dtype in TOKEN_FIELDS.items()}
    trained, experts = tokens.pop("trained"), None
    if record.get("routed"):  # states from before routers were recorded do not say
      experts = np.asarray(arrays[EXPERTS][routed : routed + record["length"]], dtype=np.int16)
      routed += record["length"]

    rewards = record.get("turn_rewards")  # only of trajectories that have any
    trajectories.append(
      Trajectory(
        **tokens,
        turn_starts=np.asarray(record["turn_starts"], dtype=np.int32),
        segment_starts=np.asarray(record["segment_starts"], dtype=np.int32),
        reward=record["reward"],
        status=Status(record["status"]),
        key=PromptKey(*record["key"]),
        rollout_id=record["rollout_id"],
        info=record["info"],
        routed_experts=experts,
        sample=record.get("sample", 0),  # states from before there were groups do not say
        baseline=record.get("baseline"),
        turn_rewards=None if rewards is None else np.asarray(rewards, dtype=np.float64),
        loss_mask=None if np.array_equal(trained, tokens["action_mask"]) else trained,
      )
    )
    start = end
  return trajectories
