"""Times, waits and deltas of a step; the expectation of the bounds on staleness."""

from __future__ import annotations

import logging
import math

import pytest
from toys.rollout_fakes import fill, make_loop, make_trajectory

from sao_jax.config import RolloutConfig
from sao_jax.training.expectation import Expectation
from sao_jax.training.step_metrics import WAITS, StepMetrics, Waits


class Clock:
  """Stands still unless told otherwise."""

  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now


def trajectory(number, latency=2.0, **options):
  return make_trajectory(number, turns=((5, 0),), info={"latency": latency}, **options)


def test_every_wait_has_its_own_name_and_their_sum_is_what_the_trainer_idles():
  clock = Clock()
  waits = Waits(clock)
  metrics = StepMetrics(make_loop(), waits, clock=clock)
  for seconds, name in enumerate(WAITS, 1):
    with waits(name):
      clock.now += seconds
  clock.now += 5.0  # the step
  step = metrics.read([trajectory(0)])
  assert [step[f"{name}_wait_seconds"] for name in WAITS] == [1, 2, 3, 4, 5]
  assert sum(step[f"{name}_wait_fraction"] for name in WAITS) == pytest.approx(step["trainer_idle_fraction"])
  assert (step["step_seconds"], step["train_seconds"], step["trainer_idle_fraction"]) == (20.0, 5.0, 0.75)

  # A wait that ends by an exception counts, and each is of its own step.
  with pytest.raises(LookupError), waits("save"):
    clock.now += 1.0
    raise LookupError
  step = metrics.read([trajectory(0)])
  assert (step["save_wait_seconds"], step["take_wait_seconds"], step["trainer_idle_fraction"]) == (1.0, 0.0, 1.0)


def test_the_time_of_an_episode_is_its_environments_or_the_samplers():
  metrics = StepMetrics(make_loop(), Waits(Clock()), clock=Clock())
  times = [{"latency": 5.0, "environment_seconds": 3.0}, {"latency": 2.0, "environment_seconds": 1.0}]
  step = metrics.read([make_trajectory(number, turns=((5, 0),), info=info) for number, info in enumerate(times)])
  assert [step[f"{name}_mean"] for name in ("latency", "environment_seconds", "sampling_seconds")] == [3.5, 2.0, 1.5]


def test_the_trainers_rates_and_the_time_of_the_phase_over_a_resume():
  clock, loop = Clock(), make_loop()
  sampler = {f"{state}_slot_seconds": 0.0 for state in ("decoding", "prefilling", "waiting", "free")}
  sampler |= {"sampled_tokens": 100, "queued_turns": 3, "preempted": 5}
  metrics = StepMetrics(loop, Waits(clock), lambda: dict(sampler), clock)
  clock.now += 4.0
  sampler |= {"sampled_tokens": 180, "decoding_slot_seconds": 6.0, "waiting_slot_seconds": 2.0, "preempted": 7}
  step = metrics.read([trajectory(0), trajectory(1)])
  assert (step["seconds"], step["tokens_per_second"], step["trajectories_per_second"]) == (4.0, 2.5, 0.5)
  assert (step["sampled_tokens_per_second"], step["sampler_queued_turns"]) == (20.0, 3)
  assert step["sampler_preempted_turns"] == 2
  shares = [step[f"sampler_{state}_fraction"] for state in ("decoding", "prefilling", "waiting", "free")]
  assert shares == [0.75, 0.0, 0.25, 0.0]

  # Another process goes on from the checkpoint.
  again = make_loop()
  again.load_state_dict(*loop.state_dict())
  metrics = StepMetrics(again, Waits(clock), clock=clock)
  clock.now += 2.0
  step = metrics.read([trajectory(2)])
  assert step["seconds"] == 6.0 and "sampled_tokens_per_second" not in step


def test_numbers_of_a_step_are_of_the_step_and_totals_are_called_so():
  loop = make_loop(batch_size=2, admission_staleness=9, max_staleness=2, staleness="mask")
  metrics, lines = StepMetrics(loop, Waits()), []
  for step, (version, latencies) in enumerate([(0, (2.0, 4.0)), (3, (1.0, 1.0)), (0, (9.0,))]):
    # In the second step one trajectory has a token that is too old.
    first = {"version": [0, 3, 3, 3, 3]} if step == 1 else {"version": version}
    fill(loop.buffer, *(trajectory(10 * step + i, t, **first) for i, t in enumerate(latencies) if step < 2))
    fill(loop.buffer, *(trajectory(10 * step + i, t, version=3) for i, t in enumerate(latencies) if step == 2))
    if step < 2:
      loop.buffer.take(2, 3 * step)
      loop.on_version(3 * step)
    lines.append(metrics.read([trajectory(0)]))
  assert [line["masked_tokens"] for line in lines] == [0, 2, 0]
  assert [line["run_masked_tokens"] for line in lines] == [0, 2, 2]
  assert [line["generated_latency_mean"] for line in lines] == [3.0, 1.0, 9.0]
  assert [line["used_latency_mean"] for line in lines[:2]] == [3.0, 1.0] and math.isnan(lines[2]["used_latency_mean"])
  assert [line["rollouts_masked"] for line in lines] == [0, 2, 2]  # part of the identity: of the run

  # Over the last steps: (3 + 1) / 2 used, (2 + 4 + 1 + 1 + 9) / 5 generated.
  assert lines[2]["used_over_generated_latency"] == pytest.approx(2.0 / 3.4)


@pytest.mark.parametrize(("tau", "biased"), [(0, True), (16, False)])
def test_what_the_event_model_expects_is_said_once(tau, biased, caplog):
  """From version to version one step of 1 s; a quarter of the episodes takes four of them."""
  config = RolloutConfig(batch_size=4, admission_staleness=2, max_staleness=tau)
  loop, expectation = make_loop(batch_size=4, admission_staleness=9), Expectation(config, places=8)
  with caplog.at_level(logging.INFO, logger="absl"):
    expectation.look(loop)  # nothing is known yet
    fill(loop.buffer, *(trajectory(i, 4.0 if i % 4 == 0 else 0.5) for i in range(8)))
    expectation.look(loop)
    assert math.isnan(expectation.expected.dropped) and not caplog.records
    loop.note_step(seconds=5.0, busy_seconds=1.0)
    expectation.look(loop)
    expectation.look(loop)
  (said,) = [record.getMessage() for record in caplog.records]
  assert f"eta = 2, tau = {tau} (drop), 8 episodes at a time of 1.38 s (longest 4 s) and steps of 1 s" in said
  assert ("Raise rollout.max_staleness" in said) == biased
  assert (expectation.expected.used_over_generated < 0.9) == (expectation.expected.dropped > 0.01) == biased


@pytest.mark.timeout(20)
def test_episodes_of_hours_are_expected_like_any_others():
  loop = make_loop(batch_size=4, admission_staleness=9)
  expectation = Expectation(RolloutConfig(batch_size=4), places=8)
  fill(loop.buffer, *(trajectory(i, 3 * 3600.0) for i in range(8)))
  loop.note_step(seconds=60.0, busy_seconds=60.0)
  expectation.look(loop)
  assert expectation.expected.used_over_generated == pytest.approx(1.0)


def test_a_resumed_run_knows_its_episodes():
  loop = make_loop(batch_size=4, admission_staleness=9)
  fill(loop.buffer, *(trajectory(i) for i in range(8)))
  loop.note_step(5.0, 1.0)
  again, expectation = make_loop(batch_size=4, admission_staleness=9), Expectation(RolloutConfig(batch_size=4), 8)
  again.load_state_dict(*loop.state_dict())
  expectation.look(again)
  assert expectation.expected.used_over_generated == pytest.approx(1.0)
