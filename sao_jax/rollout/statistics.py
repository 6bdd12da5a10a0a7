"""What the rollout side did, summed over the run: latencies, lags, lengths, idle times. Host numbers only."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.episode import Trajectory
from sao_jax.rollout.staleness import token_lags

SUMS = (
  "generated",
  "generated_latency",
  "generated_tokens",
  "used",
  "used_latency",
  "used_tokens",
  "masked_tokens",
  "retries",
  "trainer_wait_seconds",
  "busy_slot_seconds",
  "slot_seconds",
)


def length_bucket(num_sampled: int) -> int:
  """The power of two at or above a number of sampled tokens."""
  return 1 << max(num_sampled - 1, 0).bit_length()


class RolloutStatistics:
  """Sums and histograms; not thread-safe, its users share one lock.

  Dropping stale rollouts shortens the data: compare `used_latency / used` with `generated_latency / generated`, and
  the drop rate by length.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._sums: dict[str, float] = dict.fromkeys(SUMS, 0)
    self._token_lags: collections.Counter[int] = collections.Counter()
    self._generated_lengths: collections.Counter[int] = collections.Counter()
    self._dropped_lengths: collections.Counter[int] = collections.Counter()
    self._slots, self._busy, self._since = 0, 0, clock()

  def add(self, name: str, amount: float = 1) -> None:
    """Adds to one of `SUMS`."""
    self._sums[name] += amount

  def generated(self, trajectory: Trajectory) -> None:
    """A rollout has finished, whatever becomes of it."""
    self.add("generated")
    self.add("generated_latency", trajectory.info.get("latency", 0.0))
    self.add("generated_tokens", trajectory.num_sampled)
    self._generated_lengths[length_bucket(trajectory.num_sampled)] += 1

  def dropped(self, trajectory: Trajectory) -> None:
    """A rollout was dropped because of its age."""
    self._dropped_lengths[length_bucket(trajectory.num_sampled)] += 1

  def used(self, trajectory: Trajectory, version: int, masked_tokens: int) -> None:
    """The step that updates `version` trained on a trajectory, `masked_tokens` of its sampled ones left out."""
    self.add("used")
    self.add("used_latency", trajectory.info.get("latency", 0.0))
    self.add("used_tokens", trajectory.num_trained)
    self.add("masked_tokens", masked_tokens)
    lags, counts = np.unique(token_lags(trajectory, version), return_counts=True)
    self._token_lags.update(dict(zip(lags.tolist(), counts.tolist())))

  def occupy(self, busy: int, slots: int) -> None:
    """From now on `busy` of `slots` rollout slots are in use."""
    now = self._clock()
    self._sums["busy_slot_seconds"] += self._busy * (now - self._since)
    self._sums["slot_seconds"] += self._slots * (now - self._since)
    self._busy, self._slots, self._since = busy, slots, now

  def summary(self) -> dict[str, Any]:
    """The sums, means made of them (NaN: nothing to average) and the histograms."""
    self.occupy(self._busy, self._slots)
    sums = self._sums

    def ratio(numerator: str, denominator: str) -> float:
      return sums[numerator] / sums[denominator] if sums[denominator] else float("nan")

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
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Goes on from saved sums."""
    self._sums = dict.fromkeys(SUMS, 0) | state["sums"]
    self._token_lags = collections.Counter(dict(state["token_lags"]))
    self._generated_lengths = collections.Counter(dict(state["generated_lengths"]))
    self._dropped_lengths = collections.Counter(dict(state["dropped_lengths"]))
