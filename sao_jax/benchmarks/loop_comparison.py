"""The rollout loop against the event model: speed-up, idle times, lags, drops; with faults; with busy rewards.

Every point is run once. Other work on the machine delays waking threads, which counts against the loop.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Iterator
from typing import Any

from sao_jax.benchmarks.async_loop import episodes, event_loop_gap, run_loop
from sao_jax.benchmarks.scale import LoopScale, Scale
from sao_jax.benchmarks.sleeping import Sleeping
from sao_jax.rollout.event_model import LoopRecord, LoopSettings, simulate

RAISING, HANGING = 0.05, 0.02  # fractions of the episodes
POINT = ("sigma", "train_time", "slots", "eta", "tau")  # the settings that tell points apart


def loop(scale: Scale) -> dict[str, Any]:
  """Sets every figure of the real loop beside that of a scheduler without overhead on the same episodes."""
  settings = scale.loop
  points = [
    point
    for sigma in settings.sigmas
    for train_time in settings.train_times
    for point in _points(settings, sigma, train_time)
  ]

  # Summaries over all points; 1 and 0 would be a loop without overhead.
  shares = [point["speedup_over_model"] for point in points]
  idle = [point["trainer_idle"]["real"] - point["trainer_idle"]["model"] for point in points]
  worst = points[shares.index(min(shares))]

  faults = [_faults(settings, *point) for point in settings.fault_points]
  return {
    "points": points,
    "speedup_over_model": {"worst": min(shares), "median": statistics.median(shares)},
    "idle_minus_model": {"worst": max(idle, key=abs), "median": statistics.median(idle)},
    "worst_point": {name: worst[name] for name in POINT},
    "faults": faults,
    "worst_throughput_over_clean": min(point["throughput_over_clean"]["real"] for point in faults),
    "event_loop_gap_while_rewards_compute": event_loop_gap(Sleeping(0.0, 0.0, burning=settings.burn_seconds)),
  }


def _points(scale: LoopScale, sigma: float, train_time: float) -> Iterator[dict[str, Any]]:
  """Runs all placements, and compares each with the synchronous loop on the slots of the first one."""
  environment = Sleeping(scale.mean_latency, sigma)
  before = _run(scale, environment, train_time, scale.placements[0][0], 0, -1)

  for placement in scale.placements:
    after = _run(scale, environment, train_time, *placement)
    speedup = [b.wall_seconds / a.wall_seconds for b, a in zip(before, after)]
    real, model = (record.figures() for record in after)
    yield {
      **dict(zip(POINT, (sigma, train_time, *placement))),
      "speedup": _compare(*speedup),
      "speedup_over_model": speedup[0] / speedup[1],
      **{name: _compare(real[name], model[name]) for name in real},
    }


def _faults(scale: LoopScale, sigma: float, train_time: float, *placement: int) -> dict[str, Any]:
  """Measures trajectories trained per second with faults over those without; the time-out is the same in both."""
  timeout = scale.timeout * scale.mean_latency

  with silent("sao_jax.rollout"):
    clean, faulty = (
      _run(scale, Sleeping(scale.mean_latency, sigma, **faults), train_time, *placement, timeout=timeout)
      for faults in ({}, {"raising": RAISING, "hanging": HANGING})
    )
  shares = [f.figures()["trained_per_second"] / c.figures()["trained_per_second"] for f, c in zip(faulty, clean)]
  return {
    **dict(zip(POINT, (sigma, train_time, *placement))),
    "throughput_over_clean": _compare(*shares),
    "failed": _compare(*(record.failed for record in faulty)),
    "failed_clean": _compare(*(record.failed for record in clean)),
  }


def _run(
  scale: LoopScale, environment: Sleeping, train_time: float, slots: int, eta: int, tau: int, **options: float
) -> tuple[LoopRecord, LoopRecord]:
  """Runs the loop and the model with the same settings and episodes; returns (real, model)."""
  settings = LoopSettings(slots, eta, tau, train_time * scale.mean_latency, scale.batch_size, scale.steps, **options)
  return run_loop(settings, environment), simulate(settings, episodes(environment))


def _compare(real: float, model: float) -> dict[str, float]:
  return {"real": real, "model": model}


@contextlib.contextmanager
def silent(name: str) -> Iterator[None]:
  """Silences the log lines of a package, which a hundred injected failures would fill."""
  logger = logging.getLogger(name)
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    yield
  finally:
    logger.setLevel(level)
