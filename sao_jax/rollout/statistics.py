"""Sums over the run of what the rollout side did: latencies, lags, lengths, idle times. Host numbers only."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sao_jax.episode import Trajectory
from sao_jax.rollout.outcomes import Outcome
from sao_jax.rollout.staleness import token_lags

SUMS = (
  "generated",
  "generated_latency",
  "generated_tokens",
  "used",
  "used_latency",
  "used_tokens",
  "masked_tokens",
  "cancelled",
  "retries",
  "excluded_prompts",
  "trainer_wait_seconds",
  "steps",
  "seconds",
  "busy_seconds",
  "busy_slot_seconds",
  "slot_seconds",
)

RECENT = 512  # durations that are kept


def length_bucket(num_sampled: int) -> int:
  """The power of two at or above a number of sampled tokens."""
  return 1 << max(num_sampled - 1, 0).bit_length()


class Usage(NamedTuple):
  """The trajectories that one train step is given, in numbers; made without a lock, since that reads every token.

  Attributes:
    outcomes: how many of its trajectories become what, with the reason.
    token_lags: how many of the tokens trained on have each lag, in versions.
    tokens: tokens trained on.
    masked_tokens: sampled tokens left out of the losses.
    latency: seconds, summed over the trajectories.
  """

  outcomes: collections.Counter[tuple[Outcome, str]]
  token_lags: collections.Counter[int]
  tokens: int
  masked_tokens: int
  latency: float

  @classmethod
  def of(cls, trajectories: Sequence[Trajectory], version: int) -> Usage:
    """Counts what the step that updates `version` is given.

    Raises:
      RuntimeError: for a token from a version that does not exist yet.
    """
    outcomes, lag_counts, tokens, masked = collections.Counter(), collections.Counter(), 0, 0
    for trajectory in trajectories:
      sampled, trained = trajectory.num_sampled, trajectory.num_trained
      lags, counts = np.unique(token_lags(trajectory, version), return_counts=True)
      lag_counts.update(dict(zip(lags.tolist(), counts.tolist())))
      tokens, masked = tokens + trained, masked + sampled - trained

      # Whatever is left out of the losses, and be it one token, is told apart from what is trained on as it is.
      if trained == sampled:
        outcomes[Outcome.TRAINED, ""] += 1
      else:
        outcomes[Outcome.MASKED, "over-age tokens" if trained else "all tokens"] += 1
    return cls(outcomes, lag_counts, tokens, masked, sum(t.info.get("latency", 0.0) for t in trajectories))


class RolloutStatistics:
  """Sums and histograms; not thread-safe, its users share one lock.

  Dropping stale rollouts shortens the data: compare `used_latency / used` with `generated_latency / generated`, and
  the drop rate by length.

  Attributes:
    recent_seconds: durations of the rollouts that ended last, a bounded number of them.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._sums: dict[str, float] = dict.fromkeys(SUMS, 0)
    self._token_lags: collections.Counter[int] = collections.Counter()
    self._generated_lengths: collections.Counter[int] = collections.Counter()
    self._dropped_lengths: collections.Counter[int] = collections.Counter()
    self.recent_seconds: collections.deque[float] = collections.deque(maxlen=RECENT)
    self._slots, self._busy, self._since = 0, 0, clock()

  def add(self, name: str, amount: float = 1) -> None:
    """Adds to one of `SUMS`."""
    self._sums[name] += amount

  def generated(self, trajectory: Trajectory, num_sampled: int) -> None:
    """Counts a rollout that has finished, whatever becomes of it; `num_sampled` tokens of it were sampled."""
    self.add("generated")
    self.add("generated_latency", trajectory.info.get("latency", 0.0))
    self.add("generated_tokens", num_sampled)
    self.recent_seconds.append(trajectory.info.get("latency", 0.0))
    self._generated_lengths[length_bucket(num_sampled)] += 1

  def cancelled(self, seconds: float) -> None:
    """Counts a rollout that was cancelled `seconds` after its start, since it had grown too old.

    It counts as generated, or the mean over the generated ones would hide that the long ones are missing.
    """
    self.add("cancelled")
    self.add("generated")
    self.add("generated_latency", seconds)
    self.recent_seconds.append(seconds)

  def dropped(self, num_sampled: int) -> None:
    """Counts a finished rollout that was dropped because of its age, or of its group's."""
    self._dropped_lengths[length_bucket(num_sampled)] += 1

  def used(self, usage: Usage) -> None:
    """Counts a train step's trajectories."""
    self.add("used", usage.outcomes.total())
    self.add("used_latency", usage.latency)
    self.add("used_tokens", usage.tokens)
    self.add("masked_tokens", usage.masked_tokens)
    self._token_lags.update(usage.token_lags)

  def occupy(self, busy: int, slots: int) -> None:
    """Notes that from now on `busy` of `slots` rollout slots are in use."""
    now = self._clock()
    self._sums["busy_slot_seconds"] += self._busy * (now - self._since)
    self._sums["slot_seconds"] += self._slots * (now - self._since)
    self._busy, self._slots, self._since = busy, slots, now

  def summary(self) -> dict[str, Any]:
    """The sums, means made of them (NaN: nothing to average) and the histograms."""
    self.occupy(self._busy, self._slots)  # up to now
    sums = self._sums

    def ratio(numerator: str, denominator: str) -> float:
      return sums[numerator] / sums[denominator] if sums[denominator] else float("nan")

    # Means over no trajectory at all are NaN, not 0.
    lag_tokens = sum(self._token_lags.values())
    return {
      **sums,
      "mean_generated_latency": ratio("generated_latency", "generated"),
      "mean_used_latency": ratio("used_latency", "used"),
      "slots_idle_fraction": 1.0 - ratio("busy_slot_seconds", "slot_seconds"),
      "mean_lag": sum(lag * n for lag, n in self._token_lags.items()) / lag_tokens if lag_tokens else float("nan"),
      "max_lag": max(self._token_lags, default=0),
      "token_lags": dict(sorted(self._token_lags.items())),
      "dropped_by_length": dict(sorted(self._dropped_lengths.items())),
      "drop_rate_by_length": {
        length: self._dropped_lengths[length] / count for length, count in sorted(self._generated_lengths.items())
      },
    }

  def state_dict(self) -> dict[str, Any]:
    """JSON; histograms as lists of pairs, since JSON keys are strings."""
    self.occupy(self._busy, self._slots)
    return {
      "sums": dict(self._sums),
      "token_lags": sorted(self._token_lags.items()),
      "generated_lengths": sorted(self._generated_lengths.items()),
      "dropped_lengths": sorted(self._dropped_lengths.items()),
      "recent_seconds": list(self.recent_seconds),
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Goes on from saved sums."""
    self._sums = dict.fromkeys(SUMS, 0) | state["sums"]
    self._token_lags = collections.Counter(dict(state["token_lags"]))
    self._generated_lengths = collections.Counter(dict(state["generated_lengths"]))
    self._dropped_lengths = collections.Counter(dict(state["dropped_lengths"]))
    self.recent_seconds = collections.deque(state.get("recent_seconds", ()), maxlen=RECENT)  # early states have none
