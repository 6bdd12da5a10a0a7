"""The test for a plateau: it never ends a curve that still rises, and ends a flat one soon, whatever the noise."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from toys import training_toy

from sao_jax.training import phases
from sao_jax.training.plateau import plateaued, running_mean

NAN = float("nan")


def ends_after(values, **settings):
  """The number of values after which the test ends the curve; None if it never does."""
  return next((n for n in range(len(values) + 1) if plateaued(values[:n], **settings)), None)


@pytest.mark.parametrize(
  "values, settings, ends",
  [
    ([0.5] * 3, {}, None),  # fewer than window + patience
    ([0.5] * 4, {}, 4),
    ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], {}, None),
    ([0.5, 0.4, 0.3, 0.2], {}, 4),
    ([0.5, 0.5, 0.5, 0.51], {"window": 1}, 3),
    ([0.5, 0.5, 0.511, 0.511], {"window": 1}, None),
    ([0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5], {"window": 1}, 5),
    ([0.5, 0.1, 0.2, 0.3], {"window": 1}, 3),  # it rises again, but not beyond what was there
    ([NAN] * 20, {}, None),  # undefined where all returns are equal
    ([NAN, 0.5, NAN, 0.5, 0.5, NAN, 0.5], {}, 7),
    ([0.5, 0.5, 0.5], {"gain": 0.0, "window": 1}, None),
  ],
)
def test_examples(values, settings, ends):
  assert ends_after(values, **{"window": 2, "patience": 2, "gain": 0.01} | settings) == ends


@hypothesis.given(
  st.integers(0, 2**16), st.integers(1, 8), st.integers(1, 12), st.floats(1e-3, 0.1), st.floats(0.0, 0.3)
)
def test_a_curve_whose_mean_rises_enough_never_ends(seed, window, patience, gain, noise):
  """By the gain in every `patience` values, however noisy it is."""
  rng = np.random.default_rng(seed)
  values = np.cumsum(rng.uniform(0, 1e-3, 80)) + noise * rng.normal(size=80)
  means = running_mean(values, window)
  rises = [
    means[end - patience : end].max() - means[: end - patience].max() for end in range(patience + 1, len(means) + 1)
  ]
  values = values + np.arange(80) * max(0.0, gain - min(rises)) * 1.01
  assert ends_after(values, window=window, patience=patience, gain=gain) is None


@hypothesis.given(st.integers(0, 2**16), st.integers(1, 8), st.integers(2, 12), st.floats(0.01, 0.1))
def test_a_flat_or_falling_curve_ends_at_once_and_a_noisy_one_soon(seed, window, patience, gain):
  rng = np.random.default_rng(seed)
  settings = {"window": window, "patience": patience, "gain": gain}
  assert ends_after(0.3 - np.cumsum(rng.uniform(0, 0.1, 40)), **settings) == window + patience
  # The best of noisy means can rise by the noise's own range at most, so only so many times by the gain.
  noisy = 0.3 + rng.uniform(-gain, gain, 400)
  assert ends_after(noisy, **settings) <= window + 4 * patience


def test_the_curve_that_two_windows_gave_up_on():
  """Explained variance .03 after 57 steps and .12 after 300, measured every 10 steps with noise of .01."""
  steps = np.arange(10, 310, 10)
  for seed in range(50):
    values = np.interp(steps, [0, 57, 300], [0.0, 0.03, 0.12]) + np.random.default_rng(seed).normal(0, 0.01, len(steps))
    assert ends_after(values, window=5, patience=10, gain=0.01) is None


@pytest.mark.parametrize(
  "changes, values, ends",
  [
    ({}, [0.5] * 4, True),
    ({}, [], False),
    ({"min_steps": 21}, [0.5] * 4, False),
    ({"plateau_window": 3}, [0.5] * 4, False),
    ({"patience": 3}, [0.5] * 4, False),
    ({"plateau_gain": 0.0}, [0.5] * 4, False),
    ({"max_steps": 20}, [], True),
  ],
)
def test_every_setting_reaches_the_end_of_value_pretraining(changes, values, ends):
  settings = {"min_steps": 4, "max_steps": 40, "plateau_window": 2, "patience": 2, "plateau_gain": 0.01} | changes
  config = training_toy.replace(training_toy.get_config(), value_pretraining=settings)
  assert phases.ended(config, phases.value_pretraining(config), 20, values) == ends
  rl = phases.reinforcement_learning(training_toy.replace(config, training={"steps": 40}))
  assert not phases.ended(config, rl, 20, values)
