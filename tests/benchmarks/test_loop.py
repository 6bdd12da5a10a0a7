"""The loop's benchmark: the event model against pinned and analytic values, and the real loop on its episodes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from sao_jax.benchmarks import async_loop, loop_comparison, suites
from sao_jax.benchmarks.scale import QUICK
from sao_jax.benchmarks.sleeping import InstantSampler, Sleeping
from sao_jax.interrupt import Interrupt
from sao_jax.rollout.event_model import Episode, LoopSettings, expect, simulate
from sao_jax.training.rollouts import Rollouts


def log_normal(sigma, seed=0):
  rng = np.random.default_rng(seed)
  while True:
    yield Episode(float(rng.lognormal(-(sigma**2) / 2, sigma)))


# (sigma, train time, slots, eta, tau): wall, idle, lag mean, p95, max, drop rate, used / generated latency; over 400
# steps of an independent simulation with the same draws.
PINNED = {
  (1.0, 1.0, 16, 0, -1): (2022.085533, 0.802184, 0.0, 0, 0, 0.0, 1.0),
  (0.5, 0.25, 16, 1, -1): (411.973415, 0.757266, 0.996875, 2, 5, 0.0, 1.000039),
  (1.0, 1.0, 16, 2, -1): (421.519062, 0.051051, 1.942813, 4, 14, 0.0, 1.000733),
  (1.5, 0.25, 16, 2, 4): (402.634925, 0.751636, 0.894219, 3, 4, 0.041186, 0.651787),
  (1.5, 1.0, 32, 4, 8): (400.203220, 0.000508, 3.610937, 6, 8, 0.030344, 0.693043),
  (1.0, 2.0, 16, 2, 8): (800.833444, 0.001041, 1.990625, 3, 8, 0.000156, 0.997557),
}


@pytest.mark.parametrize("point", PINNED)
def test_model_against_pinned_values(point):
  sigma, train_time, slots, eta, tau = point
  settings = LoopSettings(slots, eta, tau, train_time, 16, 400, cancel=False)
  figures = simulate(settings, log_normal(sigma)).figures()
  names = ("wall_seconds", "trainer_idle", "lag_mean", "lag_p95", "lag_max", "drop_rate", "used_over_generated_latency")
  assert [figures[name] for name in names] == pytest.approx(PINNED[point], abs=2e-6)


def test_cancelling_what_is_too_old_frees_its_slot():
  """Pinned by an independent simulation; letting the same episodes go on to their ends takes a quarter longer."""
  figures = simulate(LoopSettings(16, 2, 4, 0.25, 16, 400), log_normal(1.5)).figures()
  assert figures["wall_seconds"] == pytest.approx(318.869550) and figures["lag_mean"] == pytest.approx(1.016875)
  assert figures["drop_rate"] == pytest.approx(0.058529, abs=1e-6) and figures["lag_max"] == 4
  assert figures["used_over_generated_latency"] == pytest.approx(0.757397, abs=1e-6)


def test_the_bound_of_sixteen_versions_hardly_biases_long_tailed_episodes_and_that_of_four_does():
  draws = log_normal(1.0)
  seconds = [next(draws).seconds for _ in range(512)]
  wide, narrow = (
    expect(LoopSettings(256, 4, tau, train_seconds=0.5, batch_size=128, steps=60), seconds) for tau in (16, 4)
  )
  assert wide.used_latency / wide.whole_latency > 0.9 and wide.dropped / wide.generated < 0.02
  assert narrow.used_latency / narrow.whole_latency < 0.75 and narrow.dropped / narrow.generated > 0.08


@pytest.mark.parametrize("slots", [1, 5, 8, 16])
@pytest.mark.parametrize("train_seconds", [0.0, 0.25, 3.0])
def test_synchronous_model_with_constant_latency(slots, train_seconds):
  record = simulate(LoopSettings(slots, 0, -1, train_seconds, 8, 7), itertools.repeat(Episode(0.5)))
  assert record.wall_seconds == pytest.approx(7 * (0.5 * math.ceil(8 / slots) + train_seconds))
  assert record.lags.tolist() == [0] * 56 and record.generated == 56
  assert record.busy_slot_seconds == pytest.approx(56 * 0.5)


@pytest.mark.parametrize(("train_seconds", "wall"), [(0.5, 10 * 1.0 + 0.5), (2.0, 1.0 + 10 * 2.0)])
def test_asynchronous_model_with_constant_latency(train_seconds, wall):
  """The slower of the two sides sets the pace: with eta = 1 one batch is made while another is trained on."""
  record = simulate(LoopSettings(8, 1, -1, train_seconds, 8, 10), itertools.repeat(Episode(1.0)))
  assert record.wall_seconds == pytest.approx(wall)
  assert record.figures()["trainer_idle"] == pytest.approx(1 - 10 * train_seconds / wall)
  assert record.lags.reshape(10, 8).tolist() == [[0] * 8] + [[1] * 8 if step > 0 else [0] * 8 for step in range(1, 10)]


@pytest.mark.parametrize("tau", [-1, 0, 2])
def test_model_loses_nothing(tau):
  """What was started and is not trained on, dropped or failed is in a slot or in the buffer; admission bounds both."""
  settings, started = LoopSettings(12, 3, tau, 0.3, 4, 60), []

  def episodes():
    for episode in log_normal(1.5, seed=3):
      started.append(episode._replace(failed=len(started) % 7 == 0))
      yield started[-1]

  record = simulate(settings, episodes())
  running = len(started) - record.generated - record.failed
  buffered = record.generated - record.dropped - len(record.lags)
  assert 0 <= running <= 12 and buffered >= 0 and running + buffered <= 4 * 4
  assert len(record.lags) == 60 * 4 and record.lags.min() == 0 and record.failed > 0
  assert (record.dropped > 0) == (tau >= 0) and (tau < 0 or record.lags.max() <= tau)
  assert record.wall_seconds >= 60 * 0.3 and record.busy_slot_seconds <= 12 * record.wall_seconds


SETTINGS = LoopSettings(slots=4, admission_staleness=2, max_staleness=-1, train_seconds=0.005, batch_size=4, steps=6)


def test_the_model_gets_the_very_episodes_of_the_real_loop():
  environment = Sleeping(mean=0.004, sigma=1.0, seed=5)
  rollouts = async_loop.make_loop(SETTINGS, environment, InstantSampler())
  rollouts.start()
  try:
    trajectories = Rollouts(rollouts, 12, Interrupt()).take(0)
  finally:
    rollouts.stop()
  episodes = list(itertools.islice(async_loop.episodes(environment), 1 + max(t.rollout_id for t in trajectories)))
  assert len({episode.seconds for episode in episodes}) == len(episodes)
  for trajectory in trajectories:
    assert environment.episode(trajectory.key) == episodes[trajectory.rollout_id]
    assert trajectory.info["latency"] >= episodes[trajectory.rollout_id].seconds


def test_latencies_have_the_mean_and_the_faults_the_rates_that_were_asked_for():
  environment = Sleeping(mean=2.0, sigma=0.5, raising=0.1, hanging=0.2)
  prompts = environment.prompts(environment.tokenizer(), "train", 0)
  episodes = [environment.episode(prompts[i].key) for i in range(4000)]
  latencies = np.asarray([episode.seconds for episode in episodes if not episode.failed])
  assert latencies.mean() == pytest.approx(2.0, rel=0.05) and np.log(latencies).std() == pytest.approx(0.5, rel=0.05)
  assert np.mean([e.failed and e.seconds == 0.0 for e in episodes]) == pytest.approx(0.1, rel=0.2)
  assert np.mean([e.failed and math.isinf(e.seconds) for e in episodes]) == pytest.approx(0.2, rel=0.2)


def test_real_synchronous_run():
  settings = LoopSettings(slots=3, admission_staleness=0, max_staleness=-1, train_seconds=0.002, batch_size=4, steps=3)
  updates = []
  environment = Sleeping(mean=0.004, sigma=0.5)
  record = async_loop.run_loop(settings, environment, on_update=lambda begin, end: updates.append((begin, end)))
  assert len(updates) == 3 and all(end - begin >= settings.train_seconds for begin, end in updates)
  assert all(end <= begin for (_, end), (begin, _) in zip(updates, updates[1:]))
  assert record.lags.tolist() == [0] * 12 and (record.generated, record.dropped, record.failed) == (12, 0, 0)
  assert record.wall_seconds >= 3 * 0.002 and record.busy_slot_seconds <= 3 * record.wall_seconds * 1.01
  assert record.used_latency == pytest.approx(record.generated_latency)


def test_real_run_with_exceptions_and_hangs_trains_all_its_steps():
  environment = Sleeping(mean=0.004, sigma=0.5, raising=0.2, hanging=0.2)
  settings = dataclasses.replace(SETTINGS, timeout=0.05)
  with loop_comparison.silent("sao_jax.rollout"):
    record = async_loop.run_loop(settings, environment)
  assert len(record.lags) == 6 * 4 and record.failed > 0
  modelled = simulate(settings, async_loop.episodes(environment))
  assert modelled.failed > 0 and len(modelled.lags) == 6 * 4


def test_a_reward_that_computes_in_a_thread_does_not_block_the_event_loop():
  # On the event loop it would be silent for at least 0.8 s.
  assert 0.0 <= async_loop.event_loop_gap(Sleeping(0.0, 0.0, burning=0.8)) < 0.7


def test_suite_reports_real_and_model_of_every_point():
  results = json.loads(json.dumps(loop_comparison.loop(QUICK)))
  assert len(results["points"]) == 2 and len(results["faults"]) == 1
  compared = {name for name, value in results["points"][0].items() if isinstance(value, dict)}
  assert {"speedup", "trainer_idle", "slots_busy", "lag_mean", "lag_p95", "lag_max", "drop_rate"} < compared
  worst = min(results["points"], key=lambda point: point["speedup_over_model"])
  assert results["worst_point"] == {name: worst[name] for name in loop_comparison.POINT}
  assert results["speedup_over_model"]["worst"] == worst["speedup_over_model"]
  for record in (*results["points"], *results["faults"]):
    figures = suites.flatten(record)
    assert all(math.isfinite(value) for value in figures.values())
    assert {name.removesuffix("real") for name in figures if name.endswith("/real")} == {
      name.removesuffix("model") for name in figures if name.endswith("/model")
    }
  for point in results["points"]:
    speedup = point["speedup"]
    assert point["speedup_over_model"] == pytest.approx(speedup["real"] / speedup["model"])
    assert point["lag_max"]["real"] <= point["tau"] or point["tau"] < 0
  points, faults, summary = suites.tables("loop", results)
  assert (points.row_count, faults.row_count) == (2, 1) and summary.row_count > 0
