"""Bad evidence is rejected with a named reason; it is never repaired, zero-filled or trained on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from toys.rollout_fakes import completion, make_trajectory

from sao_jax.rollout.evidence import check_completion, check_trajectory
from sao_jax.rollout.outcomes import BadEvidence


@pytest.mark.parametrize(
  "logprobs, reason",
  [
    ([-0.5, -0.5], "log-probs of another length"),
    ([-0.5] * 4, "log-probs of another length"),
    ([-0.5, None, -0.5], "log-prob not finite"),
    ([-0.5, float("nan"), -0.5], "log-prob not finite"),
    ([-0.5, float("-inf"), -0.5], "log-prob not finite"),
    ([-0.5, -9999.0, -0.5], "log-prob impossible"),
    ([-0.5, 0.1, -0.5], "log-prob positive"),
    ([[-0.5, -0.5, -0.5]], "log-probs malformed"),
    (["a", "b", "c"], "log-probs malformed"),
    (np.float32(-0.5), "log-probs malformed"),
  ],
)
def test_bad_logprobs_of_a_completion(logprobs, reason):
  with pytest.raises(BadEvidence) as error:
    check_completion(completion([5, 6, 7], logprobs=logprobs), 8, (2,))
  assert error.value.reason == reason


def test_missing_logprobs():
  with pytest.raises(BadEvidence) as error:
    check_completion(dataclasses.replace(completion([5, 6, 7]), logprobs=None), 8, (2,))
  assert error.value.reason == "log-probs missing"


@pytest.mark.parametrize(
  "change, reason",
  [
    ({"token_ids": [], "logprobs": [], "policy_versions": []}, "no sampled token"),
    ({"token_ids": [5.0, 6.0, 7.0]}, "token ids malformed"),
    ({"token_ids": None}, "token ids malformed"),
    ({"token_ids": list(range(9))}, "too many tokens"),
    ({"policy_versions": [0, 0]}, "policy versions of another length"),
    ({"policy_versions": None}, "policy versions malformed"),
    ({"policy_versions": [0, -1, 0]}, "policy version missing"),
    ({"policy_versions": [1, 0, 0]}, "policy versions decrease"),
    ({"finish_reason": "abort"}, "unknown finish reason"),
    ({"finish_reason": "stop"}, "stop without a stop token"),
  ],
)
def test_bad_completions(change, reason):
  with pytest.raises(BadEvidence) as error:
    check_completion(dataclasses.replace(completion([5, 6, 7]), **change), 8, (2,))
  assert error.value.reason == reason


def test_good_completion_has_the_dtypes_of_a_trajectory():
  token_ids, logprobs, versions = check_completion(completion([5, 6, 2], logprobs=[0.0, -30.0, 1e-7]), 3, (2,))
  assert token_ids.dtype == versions.dtype == np.int32 and logprobs.dtype == np.float32


def changed(name: str, index: int, value) -> dict[str, np.ndarray]:
  array = getattr(make_trajectory(), name).copy()
  array[index] = value
  return {name: array}


# The trajectory is prompt(2) sampled(3) observation(2) sampled(1).
@pytest.mark.parametrize(
  "change, reason",
  [
    ({"behavior_logprobs": np.float32([-1, -1])}, "behavior_logprobs of another length"),
    ({"action_mask": np.ones(3, dtype=np.bool_)}, "action_mask of another length"),
    ({"policy_version": np.zeros(9, dtype=np.int32)}, "policy_version of another length"),
    ({"action_mask": np.zeros(8, dtype=np.bool_)}, "no sampled token"),
    (changed("behavior_logprobs", 3, np.nan), "log-prob not finite"),
    (changed("behavior_logprobs", 3, -9999), "log-prob impossible"),
    (changed("behavior_logprobs", 3, 0.1), "log-prob positive"),
    (changed("behavior_logprobs", 5, 0.0), "log-prob on an unsampled token"),
    (changed("policy_version", 7, -1), "policy version missing"),
    (changed("policy_version", 2, 1), "policy versions decrease"),
    (changed("policy_version", 0, 0), "policy version on an unsampled token"),
    ({"reward": float("nan")}, "reward not finite"),
    ({"reward": float("inf")}, "reward not finite"),
    ({"reward": None}, "reward not finite"),
  ],
)
def test_bad_trajectories(change, reason):
  check_trajectory(make_trajectory())
  with pytest.raises(BadEvidence) as error:
    check_trajectory(dataclasses.replace(make_trajectory(), **change))
  assert error.value.reason == reason
