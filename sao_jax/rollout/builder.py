"""Builds a trajectory from what was sampled and what was appended, id by id; text never comes near it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from sao_jax.episode import PromptKey, Status, Trajectory


class TrajectoryBuilder:
  """One episode under construction: a prompt, then actions, each followed by an observation or by the end.

  An observation may be replaced by a prompt: then a new segment begins, whose tokens do not see those before it.

  What it builds satisfies, by construction: all arrays have one length; the action mask is True exactly on sampled
  tokens; log-probs are finite and versions >= 0 exactly there; every earlier prefix is a prefix of the result.
  """

  def __init__(self, key: PromptKey, rollout_id: int, sample: int = 0):
    self._key, self._rollout_id, self._sample = key, rollout_id, sample
    self._ids: list[np.ndarray] = []
    self._mask: list[np.ndarray] = []
    self._logprobs: list[np.ndarray] = []
    self._versions: list[np.ndarray] = []
    self._turn_starts: list[int] = []
    self._turn_rewards: list[float] = []
    self._segment_starts: list[int] = []
    self._experts: list[np.ndarray] = []
    self._num_routed = 0  # tokens that have a row in there
    self._length = 0
    self._num_sampled = 0

  def __len__(self) -> int:
    """Tokens so far, of all segments."""
    return self._length

  @property
  def context_length(self) -> int:
    """Tokens of the segment under way: prompt + actions + observations."""
    return self._length - self._segment_starts[-1] if self._segment_starts else 0

  @property
  def num_sampled(self) -> int:
    """Sampled tokens so far."""
    return self._num_sampled

  @property
  def num_turns(self) -> int:
    """Actions so far."""
    return len(self._turn_starts)

  @property
  def num_unrouted(self) -> int:
    """Tokens of the segment under way whose experts were not given yet."""
    return min(self._length - self._num_routed, self.context_length)

  @property
  def routed_shape(self) -> tuple[int, int] | None:
    """(L, k) of the experts that were given; None as long as there are none."""
    return self._experts[-1].shape[1:] if self._experts else None

  def append_prompt(self, token_ids: Int[np.ndarray, " n"]) -> None:
    """Starts the trajectory, or a new segment of it."""
    if not len(token_ids) or (self._length and not self._sampled_last):
      raise ValueError("a segment starts with exactly one prompt of at least one token, at first or after an action")
    self._segment_starts.append(self._length)
    self._append_unsampled(token_ids)

  def append_action(
    self,
    token_ids: Int[np.ndarray, " n"],
    logprobs: Float[np.ndarray, " n"],
    policy_versions: Int[np.ndarray, " n"],
    routed_experts: Int[np.ndarray, "m L k"] | None = None,
  ) -> None:
    """Appends one sampled turn, its stop token included, with the evidence recorded when it was sampled.

    `routed_experts` are those of all tokens of the segment without any so far, but for the last one, which
    the sampler has not read. None in every turn: they are not recorded.
    """
    if not self._length:
      raise ValueError("an action needs a prompt before it")
    if not len(token_ids) == len(logprobs) == len(policy_versions) > 0:
      raise ValueError(
        f"lengths differ: {len(token_ids)} ids, {len(logprobs)} log-probs, {len(policy_versions)} versions"
      )
    if not np.isfinite(logprobs).all() or min(policy_versions) < 0:
      raise ValueError("sampled tokens need finite log-probs and versions >= 0")
    if routed_experts is not None:
      self._append_experts(routed_experts, len(token_ids))
    self._turn_starts.append(self._length)
    self._turn_rewards.append(0.0)
    self._num_sampled += len(token_ids)
    self._append(token_ids, np.ones(len(token_ids), dtype=np.bool_), logprobs, policy_versions)

  def append_observation(self, token_ids: Int[np.ndarray, " n"]) -> None:
    """Appends what the environment answered; may be empty."""
    if not self._turn_starts:
      raise ValueError("an observation needs an action before it")
    self._append_unsampled(token_ids)

  def add_reward(self, reward: float) -> None:
    """Adds a reward of the turn that was appended last."""
    if not self._turn_rewards:
      raise ValueError("a reward needs an action before it")
    self._turn_rewards[-1] += reward

  @property
  def _sampled_last(self) -> bool:
    return bool(self._mask) and bool(self._mask[-1].any())

  def build(self, reward: float, status: Status, info: dict[str, float] | None = None) -> Trajectory:
    """The finished trajectory; `reward` is the last one, added to those before."""
    if not self._turn_starts:
      raise ValueError("a trajectory needs at least one action")
    rewards = np.array(self._turn_rewards, dtype=np.float64)
    rewards[-1] += reward

    return Trajectory(
      # Per token.
      token_ids=np.concatenate(self._ids),
      action_mask=np.concatenate(self._mask),
      behavior_logprobs=np.concatenate(self._logprobs),
      policy_version=np.concatenate(self._versions),
      routed_experts=self._all_experts() if self._experts else None,
      # Per turn, and per segment.
      turn_starts=np.asarray(self._turn_starts, dtype=np.int32),
      segment_starts=np.asarray(self._segment_starts, dtype=np.int32),
      turn_rewards=rewards if rewards[:-1].any() else None,
      # Once.
      reward=float(rewards.sum()),
      status=status,
      key=self._key,
      rollout_id=self._rollout_id,
      sample=self._sample,
      info=dict(info or {}),
    )

  def _append_experts(self, routed_experts: np.ndarray, num_sampled: int) -> None:
    wanted = self.num_unrouted + num_sampled - 1
    if len(routed_experts) != wanted:
      raise ValueError(f"the experts of {wanted} tokens are wanted, those of {len(routed_experts)} were given")
    experts = np.array(routed_experts, dtype=np.int16)
    skipped = self._length - self.num_unrouted - self._num_routed  # the end of an earlier segment
    self._experts += [np.full((skipped, *experts.shape[1:]), -1, np.int16), experts]
    self._num_routed += skipped + wanted

  def _all_experts(self) -> Int[np.ndarray, "T L k"]:
    """The experts of all tokens; -1 for those that the sampler has not read."""
    missing = (self._length - self._num_routed, *self._experts[-1].shape[1:])
    return np.concatenate([*self._experts, np.full(missing, -1, np.int16)])

  def _append_unsampled(self, token_ids: Int[np.ndarray, " n"]) -> None:
    n = len(token_ids)
    self._append(
      token_ids, np.zeros(n, dtype=np.bool_), np.full(n, np.nan, dtype=np.float32), np.full(n, -1, dtype=np.int32)
    )

  def _append(self, token_ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
    self._ids.append(np.array(token_ids, dtype=np.int32))
    self._mask.append(mask)
    self._logprobs.append(np.array(logprobs, dtype=np.float32))
    self._versions.append(np.array(versions, dtype=np.int32))
    self._length += len(token_ids)
