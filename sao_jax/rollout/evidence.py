"""Evidence checks: what the sampler recorded is complete and possible, or the trajectory is rejected with its reason.

Behaviour log-probs are never recomputed, zero-filled or repaired: a wrong one would look like a policy lag to the loss
(arXiv 2607.07508, eq. 1), which trains on it without any complaint.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from sao_jax.episode import Trajectory
from sao_jax.rollout.outcomes import BadEvidence
from sao_jax.sampler.requests import Completion


class RequiredExperts(NamedTuple):
  """The experts that a trajectory brings along when the learner replays the sampler's routing.

  Attributes:
    num_layers: layers with experts.
    num_active: experts of a token in each of them, all different.
    num_experts: ids lie below it.
  """

  num_layers: int
  num_active: int
  num_experts: int


# A token with log-prob -100 (p = 4e-44, below fp32's smallest number) cannot have been sampled: it is a sentinel.
MIN_LOGPROB = -100.0
# fp32 log-softmax of a nearly certain token may round to a little above 0.
MAX_LOGPROB = 1e-5
MAX_REWARD = float(np.finfo(np.float32).max)


def check_completion(
  completion: Completion, max_tokens: int, stop_ids: tuple[int, ...]
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"], Int[np.ndarray, " n"]]:
  """Returns (token ids int32, log-probs float32, policy versions int32) of one sampled turn.

  Raises:
    BadEvidence: with the reason.
  """
  # The ids, and why they end where they end.
  ids = _flat("token ids", completion.token_ids, np.integer)
  if len(ids) == 0:
    raise BadEvidence("no sampled token", "the completion is empty")
  if len(ids) > max_tokens:
    raise BadEvidence("too many tokens", f"{len(ids)} sampled tokens, {max_tokens} were asked for")
  if completion.finish_reason not in ("stop", "length", "context"):
    raise BadEvidence("unknown finish reason", repr(completion.finish_reason))
  if completion.finish_reason == "stop" and int(ids[-1]) not in stop_ids:
    raise BadEvidence("stop without a stop token", f"last id {ids[-1]}, stop ids {stop_ids}")

  # What was recorded with them, one number each.
  if completion.logprobs is None:
    raise BadEvidence("log-probs missing", "the completion has none")
  logprobs = _flat("log-probs", completion.logprobs, np.floating)
  versions = _flat("policy versions", completion.policy_versions, np.integer)
  for name, array in (("log-probs", logprobs), ("policy versions", versions)):
    if len(array) != len(ids):
      raise BadEvidence(f"{name} of another length", f"{len(ids)} token ids, {len(array)} {name}")

  # Numbers that a sampler can have recorded.
  _check_logprobs(logprobs)
  _check_versions(versions)
  return ids.astype(np.int32), logprobs.astype(np.float32), versions.astype(np.int32)


def check_routed_experts(
  routed_experts: Any, length: int, shape: tuple[int, int] | None = None
) -> Int[np.ndarray, "m L k"] | None:
  """Returns the experts of `length` tokens of one turn as int16, or None where the sampler does not record them.

  `shape` is the (L, k) of the turns before, None in the first one.

  Raises:
    BadEvidence: with the reason.
  """
  if routed_experts is None:
    return None
  array = np.asarray(routed_experts)
  if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer):
    raise BadEvidence("routed experts malformed", f"{array.dtype} of shape {array.shape}")
  if shape is not None and array.shape[1:] != shape:
    raise BadEvidence("routed experts of another shape", f"{array.shape[1:]} after {shape}")
  if array.size and not 0 <= array.min() <= array.max() < 2**15:
    raise BadEvidence("routed experts impossible", f"ids from {array.min()} to {array.max()}")
  if len(array) != length:
    raise BadEvidence("routed experts of another length", f"those of {length} tokens are wanted, got {len(array)}")
  return array.astype(np.int16)


def check_trajectory(
  trajectory: Trajectory, required_experts: RequiredExperts | None = None, longest_context: int | None = None
) -> None:
  """Checks a whole trajectory, whoever made it.

  Args:
    trajectory: what is to be trained on.
    required_experts: the experts that it must bring along; None: any it has are not looked at.
    longest_context: tokens that each of its segments may have; None: any number.

  Raises:
    BadEvidence: with the reason.
  """
  length = len(trajectory.token_ids)
  for name in ("action_mask", "behavior_logprobs", "policy_version"):
    if len(getattr(trajectory, name)) != length:
      raise BadEvidence(f"{name} of another length", f"{length} token ids, {len(getattr(trajectory, name))} entries")
  if longest_context is not None and trajectory.longest_segment > longest_context:
    problem = f"{trajectory.longest_segment} tokens, a row has at most {longest_context}"
    raise BadEvidence("context longer than a row", problem)
  mask = trajectory.action_mask
  if not mask.any():
    raise BadEvidence("no sampled token", f"{length} tokens, none of them sampled")
  _check_logprobs(trajectory.behavior_logprobs[mask])
  _check_versions(trajectory.policy_version[mask])
  _check_unsampled(trajectory, ~mask)
  if required_experts is not None:
    _check_routed(trajectory, required_experts)
  _check_rewards(trajectory)


def _check_rewards(trajectory: Trajectory) -> None:
  reward, of_turns = trajectory.reward, trajectory.turn_rewards
  if not isinstance(reward, float) or not abs(reward) <= MAX_REWARD:
    raise BadEvidence("reward not finite", f"{reward!r:.80}, in fp32")
  if of_turns is None:
    return
  if of_turns.shape != trajectory.turn_starts.shape:
    raise BadEvidence("turn rewards of another length", f"{len(trajectory.turn_starts)} turns, {len(of_turns)} rewards")
  if not (np.abs(of_turns) <= MAX_REWARD).all():
    raise BadEvidence("reward not finite", f"{of_turns}, in fp32")
  if abs(of_turns.sum() - reward) > 1e-6 * np.abs(of_turns).sum():
    raise BadEvidence("turn rewards do not add up", f"{of_turns.sum()}, not {reward}")


def _check_routed(trajectory: Trajectory, wanted: RequiredExperts) -> None:
  experts, shape = trajectory.routed_experts, (len(trajectory), wanted.num_layers, wanted.num_active)
  if experts is None:
    raise BadEvidence("routed experts missing", "the sampler did not record them")
  if experts.shape != shape:
    raise BadEvidence("routed experts of another shape", f"{experts.shape}, not {shape}")
  recorded = (experts != -1).any(axis=(1, 2))
  ids = np.sort(experts[recorded], axis=-1)
  if (ids < 0).any() or (ids >= wanted.num_experts).any() or (np.diff(ids, axis=-1) == 0).any():
    raise BadEvidence("routed experts impossible", f"not {wanted.num_active} of {wanted.num_experts} experts")
  before_sampled = np.append(trajectory.action_mask[1:], False)  # what the sampler has read for certain
  if not recorded[before_sampled].all():
    raise BadEvidence("routed experts missing", "of a token before a sampled one")


def _flat(name: str, values: Any, kind: type[np.generic]) -> np.ndarray:
  try:
    array = np.asarray(values, dtype=np.float32) if kind is np.floating else np.asarray(values)
  except (TypeError, ValueError) as error:
    raise BadEvidence(f"{name} malformed", str(error)) from error
  if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, kind)):
    raise BadEvidence(f"{name} malformed", f"{array.dtype} of shape {array.shape}")
  return array


def _check_logprobs(logprobs: Float[np.ndarray, " n"]) -> None:
  if not np.isfinite(logprobs).all():
    raise BadEvidence("log-prob not finite", f"{int((~np.isfinite(logprobs)).sum())} of {len(logprobs)}")
  if logprobs.max() > MAX_LOGPROB:
    raise BadEvidence("log-prob positive", f"{logprobs.max()}")
  if logprobs.min() < MIN_LOGPROB:
    raise BadEvidence("log-prob impossible", f"{logprobs.min()} cannot have been sampled")


def _check_versions(versions: Int[np.ndarray, " n"]) -> None:
  if versions.min() < 0:
    raise BadEvidence("policy version missing", f"{versions.min()} on a sampled token")
  if (np.diff(versions) < 0).any():
    raise BadEvidence("policy versions decrease", "a later token has an older version")


def _check_unsampled(trajectory: Trajectory, unsampled: Bool[np.ndarray, " T"]) -> None:
  if not np.isnan(trajectory.behavior_logprobs[unsampled]).all():
    raise BadEvidence("log-prob on an unsampled token", "it must be NaN")
  if not (trajectory.policy_version[unsampled] == -1).all():
    raise BadEvidence("policy version on an unsampled token", "it must be -1")
