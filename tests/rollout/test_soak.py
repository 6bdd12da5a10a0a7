"""A run with faults all the time: it never stands still and loses nothing.

`SOAK_SECONDS` in the environment sets how long it takes; `pytest -o log_cli=true --log-cli-level=INFO` shows figures.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import threading
import time

import numpy as np
import pytest
from toys import graders
from toys.rollout_fakes import FakeEnvironment, FakeSampler, Running, completion, make_loop

from sao_jax.environments.base import StepResult
from sao_jax.environments.wrappers import Chaos, SimulatedLatency
from sao_jax.interrupt import Interrupt
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rollout.outcomes import Outcome, check_identity
from sao_jax.training.rollouts import Rollouts

log = logging.getLogger(__name__)

SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
STANDSTILL = 10.0  # seconds without a batch that are taken for a deadlock: far beyond any time-out here
RATES = {"raises": 0.05, "hangs": 0.02}
BATCH = 16


@dataclasses.dataclass(frozen=True)
class Graded:
  """Two turns, then a grader in another process, which sometimes hangs or dies itself."""

  pool: GraderPool
  name: str = "fake"

  def make(self, tokenizer):
    pool = self.pool

    class Episode(FakeEnvironment):
      async def step(self, action_ids):
        result = await super().step(action_ids)
        if not result.done:
          return result
        kind = {0: "hang", 1: "die"}.get(self.prompt.key.id % 400, "read")
        return StepResult([], True, await pool.grade(self.name, kind))

    return Episode()


@pytest.fixture(scope="module")
def pool():
  pool = GraderPool(graders.misbehave, processes=2, timeout=0.5)
  yield pool
  pool.close()


def run(environment, seconds: float) -> dict:
  """Trains for so long, in steps that sleep; asserts progress and the identity of the counters all the time."""

  def reply(request):
    bad = request.rollout_id % 100 == 50
    return completion([7, 2], version=sampler.version, logprobs=[-0.5, math.nan] if bad else None)

  sampler = FakeSampler(delay=lambda rollout_id: 0.002, reply=reply)
  loop = make_loop(
    lambda: environment.make(None),
    sampler,
    slots=48,
    batch_size=BATCH,
    admission_staleness=3,
    max_staleness=6,
    environment_timeout=1.0,
    environment_retries=1,
    watchdog_seconds=STANDSTILL,
  )
  sampler.requests = collections.deque(maxlen=1)  # it would keep them all
  version, longest, gap, began = 0, 0.0, 0.0, time.monotonic()
  with Running(loop):
    while (now := time.monotonic()) < began + seconds:
      Rollouts(loop, BATCH, Interrupt()).take(version)
      longest = max(longest, time.monotonic() - now)
      assert longest < STANDSTILL
      time.sleep(0.1)
      version += 1
      sampler.version = version
      loop.on_version(version)
      stats = loop.stats()
      check_identity(stats)
      gap = max(gap, stats["max_event_loop_gap"])
    seconds = time.monotonic() - began
  after = loop.stats()
  check_identity(after)
  assert after["in_flight"] == after["in_training"] == 0 and not sampler.open
  assert after["submitted"] == sum(after[outcome.value] for outcome in Outcome) + after["buffered"]
  assert after["trained"] == version * BATCH
  return after | {"per_second": after["trained"] / seconds, "longest_wait": longest, "largest_gap": gap}


def test_faults_all_the_time(pool):
  latency = {"mean": 0.1, "sigma": 0.5}
  threads = threading.active_count()
  clean = run(SimulatedLatency(Graded(pool), **latency), SECONDS / 3)
  chaos = Chaos(SimulatedLatency(Graded(pool), **latency), **RATES, slow=0.01, garbage=0.01, kills=0.002)
  faulty = run(chaos, 2 * SECONDS / 3)
  for name, stats in (("clean", clean), ("faulty", faulty)):
    keys = ("submitted", *(o.value for o in Outcome), "retries", "max_lag", "per_second", "longest_wait", "largest_gap")
    reasons = {key: count for key, count in stats.items() if "/" in key}
    log.info("%s: %s", name, {key: stats[key] for key in keys} | reasons)
  failed = faulty["failed_environment"] / faulty["submitted"]
  assert failed == pytest.approx(0.05 + 0.01 * 2 / 3, rel=0.5)  # garbage for a reward is the grader's failure
  assert faulty["failed_infrastructure/EnvironmentTimeout"] / faulty["submitted"] == pytest.approx(0.02, rel=0.7)
  assert faulty["filtered"] > 0 and np.isfinite(faulty["mean_lag"]) and faulty["max_lag"] <= 6
  assert threading.active_count() <= threads + 2  # the pool's own
