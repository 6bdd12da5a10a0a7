"""Host-side numbers of each train step: times, waits, and what the rollout side did since the step before.

Everything is of one step, but for the names that begin with `rollouts_` or `run_`, which are totals of the run.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.episode import Trajectory
from sao_jax.report.by_environment import environment_metrics
from sao_jax.rollout.outcomes import Outcome, Place
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.sampler.slot_times import SLOT_STATES

WAITS = ("take", "compile", "publish", "evaluation", "save")
OVER_THE_RUN = ("masked_tokens", "retries", "cancelled", "drop_rate_by_length")
WINDOW = 50  # steps over which used episodes are compared with generated ones


class Waits:
  """Seconds in which the trainer waits, by what it waits for.

  No train step runs meanwhile, but for those of the critic alone, which nothing waits for: their share is too large.

  Example:
    with waits("save"):
      checkpointer.save(...)
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._seconds = dict.fromkeys(WAITS, 0.0)

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    """Counts the time inside as a wait for one of `WAITS`."""
    began = self._clock()
    try:
      yield
    finally:
      self._seconds[name] += self._clock() - began

  def pop(self) -> dict[str, float]:
    """Returns the seconds of each wait since the last call."""
    seconds, self._seconds = self._seconds, dict.fromkeys(WAITS, 0.0)
    return seconds


def wait_metrics(waits: Mapping[str, float], seconds: float) -> dict[str, float]:
  """Returns what the trainer waited for in a step of so many seconds; the step itself is what is no wait."""
  waited = sum(waits.values())
  return {
    **{f"{name}_wait_seconds": each for name, each in waits.items()},
    **{f"{name}_wait_fraction": each / seconds for name, each in waits.items()},
    "trainer_idle_fraction": waited / seconds,
    "train_seconds": seconds - waited,
  }


class StepClock:
  """Wall-clock time of a phase, across resumes, and what was trained in each second of it.

  Attributes:
    seconds: time since the phase began, up to the last `lap`; what a killed process did after its last save is not in.
  """

  def __init__(self, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic):
    """`seconds`: of the processes before."""
    self.seconds, self._clock, self._began = seconds, clock, clock()

  def lap(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Ends a step that trains on `trajectories`, and returns its times and rates."""
    now = self._clock()
    step_seconds, self._began = max(now - self._began, 1e-9), now
    self.seconds += step_seconds
    return {
      "seconds": self.seconds,
      "step_seconds": step_seconds,
      "tokens_per_second": sum(t.num_trained for t in trajectories) / step_seconds,
      "trajectories_per_second": len(trajectories) / step_seconds,
    }


class StepMetrics:
  """Numbers of each train step, from the running sums of rollout loop and sampler."""

  def __init__(
    self,
    loop: RolloutLoop,
    waits: Waits,
    sampler_stats: Callable[[], Mapping[str, float]] = dict,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Args:
    loop: its sums say how long the phase has lasted before.
    waits: those of the trainer.
    sampler_stats: counters of the sampler; empty where there is none.
    clock: seconds.
    """
    self._loop, self._waits, self._sampler_stats = loop, waits, sampler_stats
    self._before, self._sampler_before = loop.stats(), sampler_stats()
    self._clock = StepClock(self._before["seconds"], clock)
    self._window = collections.deque([self._before], maxlen=WINDOW + 1)

  def read(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Returns the numbers since the last call; call it once per step, with the step's trajectories."""
    before, stats, sampler = self._before, self._loop.stats(), self._sampler_stats()
    since = {name: stats[name] - before.get(name, 0) for name, value in stats.items() if isinstance(value, int | float)}

    # Times: the step is what is no wait.
    metrics = self._clock.lap(trajectories)
    seconds, waits = metrics["step_seconds"], self._waits.pop()
    metrics |= wait_metrics(waits, seconds)
    self._loop.note_step(seconds, max(metrics["train_seconds"], 0.0))

    # Where rollouts and the sampler's slots spent it.
    metrics["place_idle_fraction"] = 1.0 - since["busy_slot_seconds"] / max(since["slot_seconds"], 1e-9)
    metrics |= _sampler_metrics(sampler, self._sampler_before, seconds)

    # The step's trajectories, and where the time of their episodes went.
    latency, environment = (_mean_info(trajectories, name) for name in ("latency", "environment_seconds"))
    metrics |= {
      "response_length_mean": float(np.mean([t.num_sampled for t in trajectories])),
      "turns_mean": float(np.mean([len(t.turn_starts) for t in trajectories])),
      "truncated_fraction": float(np.mean([t.status.truncated for t in trajectories])),
      "latency_mean": latency,
      "environment_seconds_mean": environment,
      "sampling_seconds_mean": latency - environment,
      "event_loop_gap": stats["max_event_loop_gap"],
    }
    metrics |= environment_metrics(trajectories)

    # What the rollout side did since the last call, and how far what is used differs from what is generated.
    metrics |= {name: since[name] for name in ("masked_tokens", "retries", "cancelled", "excluded_prompts")}
    metrics |= {
      "generated_latency_mean": _ratio(since["generated_latency"], since["generated"]),
      "used_latency_mean": _ratio(since["used_latency"], since["used"]),
      "dropped_fraction": _ratio(since[Outcome.DROPPED_STALE.value], since["generated"]),
    }
    metrics["used_over_generated_latency"] = _used_over_generated(self._window[0], stats)

    # Totals of the run; `stats` has checked that the first of these is the sum of the others.
    metrics |= {f"rollouts_{name}": stats[name] for name in ("submitted", *(part.value for part in (*Place, *Outcome)))}
    metrics["rollouts_by_reason"] = {name: count for name, count in stats.items() if "/" in name}
    metrics |= {f"run_{name}": stats[name] for name in OVER_THE_RUN}
    self._before, self._sampler_before = stats, sampler
    self._window.append(stats)
    return metrics


def _mean_info(trajectories: Sequence[Trajectory], name: str) -> float:
  return float(np.mean([trajectory.info.get(name, 0.0) for trajectory in trajectories]))


def _ratio(numerator: float, denominator: float) -> float:
  return numerator / denominator if denominator else float("nan")


def _used_over_generated(before: Mapping[str, float], now: Mapping[str, float]) -> float:
  """Mean duration of the episodes trained on, as a share of that of all; NaN as long as there is neither."""
  sums = {n: now[n] - before[n] for n in ("used", "used_latency", "generated", "generated_latency")}
  used, generated = _ratio(sums["used_latency"], sums["used"]), _ratio(sums["generated_latency"], sums["generated"])
  return _ratio(used, generated)


def _sampler_metrics(now: Mapping[str, float], before: Mapping[str, float], seconds: float) -> dict[str, float]:
  """Tokens per second, and the share of the slots' time in each state; nothing without a sampler."""
  if not now:
    return {}
  spent = {state: now[f"{state}_slot_seconds"] - before[f"{state}_slot_seconds"] for state in SLOT_STATES}
  all_slots = sum(spent.values())
  return {
    "sampled_tokens_per_second": (now["sampled_tokens"] - before["sampled_tokens"]) / seconds,
    **{f"sampler_{state}_fraction": _ratio(slot_seconds, all_slots) for state, slot_seconds in spent.items()},
    "sampler_queued_turns": now["queued_turns"],
    "sampler_preempted_turns": now["preempted"] - before["preempted"],
  }
