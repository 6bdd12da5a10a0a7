"""A discrete-event model of the loop: the figures of a scheduler without any overhead on the same episodes.

A trainer needs `train_seconds` for `batch_size` trajectories, taken in the order in which they finished. An episode
starts as soon as a slot is free and in flight + buffered + in training < (eta + 1) * batch_size. It counts as sampled
by the version at its start. With eta = 0 this is the synchronous loop. A trajectory that is more than tau versions old
is dropped, and an episode that has grown as old is cancelled. Dropped trajectories, cancelled episodes and failed ones
give their capacity back.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True)
class LoopSettings:
  """One point of the comparison.

  Attributes:
    slots: the largest number of episodes at the same time.
    admission_staleness: eta, in train steps.
    max_staleness: tau, in versions; -1 for no bound.
    train_seconds: duration of a train step.
    batch_size: trajectories per train step.
    steps: train steps.
    timeout: seconds after which an episode fails.
    cancel: end episodes once they are too old; False lets them go on to their ends, to be dropped there.
  """

  slots: int
  admission_staleness: int
  max_staleness: int
  train_seconds: float
  batch_size: int
  steps: int
  timeout: float = 3600.0
  cancel: bool = True


class Episode(NamedTuple):
  """One episode as the model sees it."""

  seconds: float  # during which it occupies its slot
  failed: bool = False  # it leaves no trajectory


@dataclasses.dataclass(frozen=True)
class LoopRecord:
  """The record of a run, from the start of the first episode to the end of the last train step.

  Attributes:
    settings: the run's settings.
    wall_seconds: the run's duration.
    busy_slot_seconds: time in which slots held episodes, summed over slots.
    lags: int64 [n], versions between sampling and training, for every trajectory trained on.
    generated: number of episodes that ended with a trajectory, or were cancelled because of their age.
    dropped: number of these that became too old.
    failed: number of episodes that ended without a trajectory.
    generated_latency: mean seconds of the generated episodes, as far as they went.
    whole_latency: mean seconds that they would have taken to their ends.
    used_latency: mean seconds of the episodes trained on.
  """

  settings: LoopSettings
  wall_seconds: float
  busy_slot_seconds: float
  lags: Int[np.ndarray, " n"]
  generated: int
  dropped: int
  failed: int
  generated_latency: float
  whole_latency: float
  used_latency: float

  def figures(self) -> dict[str, float]:
    """Computes the figures to compare; all of the trainer's time outside train steps counts as idle."""
    settings = self.settings
    return {
      "wall_seconds": self.wall_seconds,
      "trained_per_second": len(self.lags) / self.wall_seconds,
      "trainer_idle": 1.0 - settings.steps * settings.train_seconds / self.wall_seconds,
      "slots_busy": self.busy_slot_seconds / (settings.slots * self.wall_seconds),
      "lag_mean": float(np.mean(self.lags)),
      "lag_p95": float(np.percentile(self.lags, 95)),
      "lag_max": float(np.max(self.lags)),
      "drop_rate": self.dropped / self.generated,
      "used_over_generated_latency": self.used_latency / self.generated_latency,
    }


def simulate(settings: LoopSettings, episodes: Iterator[Episode]) -> LoopRecord:
  """Plays a run through, from event to event.

  Args:
    settings: the run's settings.
    episodes: the episodes in the order of their starts: endless draws, or the very episodes of a real run.
  """
  limit = (settings.admission_staleness + 1) * settings.batch_size
  now, busy, version, running, in_training, failed = 0.0, 0.0, 0, 0, 0, 0
  ends: list[tuple[float, int, int, Episode]] = []  # (time, number, version at the start, episode), a heap
  step_ends = float("inf")
  buffer: collections.deque[tuple[int, Episode]] = collections.deque()  # (version at the start, episode)
  generated, whole, used, lags, dropped, started = [], [], [], [], 0, 0
  oldest = 0  # the oldest version that may still be trained on

  while version < settings.steps:
    # All that happens at this moment: drop what has become too old, begin a train step, start episodes.
    if 0 <= settings.max_staleness < version - oldest:
      oldest = version - settings.max_staleness
      fresh = [item for item in buffer if item[0] >= oldest]
      doomed = [item for item in ends if settings.cancel and item[2] < oldest]
      dropped += len(buffer) - len(fresh) + len(doomed)
      buffer, running = collections.deque(fresh), running - len(doomed)
      if doomed:
        ends = [item for item in ends if item[2] >= oldest]
        heapq.heapify(ends)
      generated += [episode.seconds - (end - now) for end, _, _, episode in doomed]
      whole += [episode.seconds for _, _, _, episode in doomed]
    if not in_training and len(buffer) >= settings.batch_size:
      taken = [buffer.popleft() for _ in range(settings.batch_size)]
      lags += [version - start for start, _ in taken]
      used += [episode.seconds for _, episode in taken]
      in_training, step_ends = settings.batch_size, now + settings.train_seconds
    while running < settings.slots and running + len(buffer) + in_training < limit:
      episode = next(episodes)
      if episode.seconds > settings.timeout:
        episode = Episode(settings.timeout, failed=True)
      heapq.heappush(ends, (now + episode.seconds, started, version, episode))
      started, running = started + 1, running + 1

    # Go to the next event: an episode or the train step ends; the episode goes first when both do.
    then = min(step_ends, ends[0][0] if ends else step_ends)
    busy, now = busy + running * (then - now), then
    if ends and ends[0][0] <= step_ends:
      _, _, start, episode = heapq.heappop(ends)
      running -= 1
      if episode.failed:
        failed += 1
      else:
        generated.append(episode.seconds)
        whole.append(episode.seconds)
        if start >= oldest:
          buffer.append((start, episode))
        else:
          dropped += 1
    else:
      version, in_training, step_ends = version + 1, 0, float("inf")

  return LoopRecord(
    settings=settings,
    wall_seconds=now,
    busy_slot_seconds=busy,
    lags=np.asarray(lags, dtype=np.int64),
    generated=len(generated),
    dropped=dropped,
    failed=failed,
    generated_latency=float(np.mean(generated)),
    whole_latency=float(np.mean(whole)),
    used_latency=float(np.mean(used)),
  )


def expect(settings: LoopSettings, seconds: Sequence[float]) -> LoopRecord:
  """Plays a run of episodes that take as long as those seen, drawn from `seconds` with replacement and a fixed seed."""
  draws = np.random.default_rng(0)
  seen = np.asarray(seconds, np.float64)
  episodes = (Episode(float(each)) for _ in iter(int, 1) for each in draws.choice(seen, 1024))
  return simulate(settings, episodes)
