"""Measures: summaries of curves against loops and numbers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sao_jax.errors import ConfigError
from sao_jax.study.measures import recovery, split_measure, value_of
from sao_jax.study.series import Series, series_of


def lines(**metrics):
  """A metric line for each step, whose policy version is the step."""
  columns = zip(*metrics.values(), strict=True)
  return [
    {"policy_version": number} | dict(zip(metrics, values, strict=True)) for number, values in enumerate(columns, 1)
  ]


def measured(measure, found):
  return value_of(measure, lambda metric: series_of(found, metric))


def test_summaries_are_those_of_plain_loops():
  values = np.random.default_rng(0).gamma(2.0, size=300)
  found = lines(loss=values.tolist())
  ordered = sorted(values)
  assert measured("loss:mean", found) == pytest.approx(sum(values) / 300)
  assert measured("loss:median", found) == pytest.approx((ordered[149] + ordered[150]) / 2)
  assert measured("loss:max", found) == ordered[-1]
  assert measured("loss:spikes", found) == pytest.approx(ordered[-1] / ((ordered[149] + ordered[150]) / 2))

  # Of 300 updates the last tenth are 270 to 300, the first one 1 to 30.
  first, last = np.mean(values[:30]), np.mean(values[269:])
  assert measured("loss", found) == measured("loss:end", found) == pytest.approx(last)
  assert measured("loss:begin", found) == pytest.approx(first)
  assert measured("loss:change", found) == pytest.approx(last - first)

  # A dip is one of means over 31 steps, fewer at the ends.
  smoothed = [np.mean(values[max(0, at - 15) : at + 16]) for at in range(300)]
  deepest = max(smoothed[at] - smoothed[later] for at in range(300) for later in range(at, 300))
  assert measured("loss:worst_dip", found) == pytest.approx(deepest)

  squares = [(after - before) ** 2 for before, after in zip(values[:-1], values[1:], strict=True)]
  assert measured("loss:noise", found) == pytest.approx(math.sqrt(sum(squares) / 299 / 2))


def test_dips_and_spikes_by_hand():
  assert measured("reward:worst_dip", lines(reward=[0.1, 0.5, 0.2, 0.4, 0.9, 0.8])) == pytest.approx(0.3)
  assert measured("reward:worst_dip", lines(reward=[0.125, 0.25, 0.25, 0.5])) == 0.0
  assert measured("norm:spikes", lines(norm=[2.0, 2.0, 12.0, 2.0, 1.0])) == 6.0
  assert math.isnan(measured("norm:spikes", lines(norm=[0.0, 0.0, 0.0])))
  assert measured("norm:noise", lines(norm=[1.0, 3.0, 1.0])) == pytest.approx(math.sqrt(2))
  assert math.isnan(measured("norm:noise", lines(norm=[1.0])))


def test_a_measure_may_add_metrics_and_undefined_values_are_left_out():
  found = lines(low=[0.1, 0.2, None], high=[0.3, None, 0.5])
  assert measured("low+high:mean", found) == pytest.approx(0.4)
  assert math.isnan(measured("low+other", found)) and math.isnan(measured("nothing:recovery", found))
  with pytest.raises(ConfigError, match="Did you mean 'worst_dip'"):
    split_measure("reward_mean:worst_dib")


def test_the_critics_warm_up_does_not_count():
  """Ten steps of version 0, then two updates; a run that never updates its policy has nothing else."""
  warm = [{"policy_version": 0, "reward": 0.1}] * 10
  found = [*warm, {"policy_version": 1, "reward": 0.4}, {"policy_version": 2, "reward": 0.6}]
  assert measured("reward:mean", found) == pytest.approx(0.5) and measured("reward:begin", found) == 0.4
  assert measured("reward:mean", warm) == pytest.approx(0.1)


def test_recovery_counts_updates_from_each_switch():
  """Success .8 before; 0 behind the switches, then .8 again: after 20 updates, and never in the last phase."""
  success, phase = [0.8] * 40 + [0.0] * 20 + [0.8] * 20 + [0.0] * 40, [0.0] * 40 + [1.0] * 40 + [2.0] * 40
  curves = [Series(np.arange(120.0), np.array(values)) for values in (success, phase)]
  # The mean of five steps is .8 at the 25th step of the phase, 24 updates behind its first one; the last phase has 40.
  assert recovery(*curves) == pytest.approx((24 + 39) / 2)

  # Steps in which both phases meet belong to that of the most trajectories.
  mixed = Series(curves[1].x, np.array([0.0] * 38 + [0.3, 0.7] + [1.0] * 40 + [2.0] * 40))
  assert recovery(curves[0], mixed) == pytest.approx((25 + 39) / 2)
  found = lines(**{"info_success/styles": success, "info_phase/styles": phase})
  assert measured("info_success/styles:recovery", found) == pytest.approx(31.5)
  assert math.isnan(measured("info_success/styles:recovery", lines(**{"info_success/styles": success})))
