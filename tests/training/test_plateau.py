"""Value pretraining ends once explained variance plateaus, stays ended, and training tells when it has not."""

from __future__ import annotations

import jax
import pytest
from absl import logging
from toys import training_toy

from sao_jax.learner import placement, setup
from sao_jax.report.metrics import read_metrics
from sao_jax.training import loop, phases

NAN = float("nan")


def make_config(**changes):
  settings = {"min_steps": 4, "max_steps": 40, "plateau_window": 2, "plateau_gain": 0.01} | changes
  return training_toy.replace(
    training_toy.get_config(), value_pretraining=settings, training={"audit": False, "checkpoint_every": 1000}
  )


@pytest.mark.parametrize(
  "known, changes, ends",
  [
    ([0.5, 0.5, 0.5, 0.5], {}, True),
    ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], {}, False),
    ([0.5, 0.4, 0.3, 0.2], {}, True),
    ([0.5, 0.5, 0.509, 0.509], {}, True),
    ([0.5, 0.5, 0.511, 0.511], {}, False),
    ([0.5, 0.5, 0.511, 0.511], {"plateau_gain": 0.02}, True),
    ([0.0, 0.0, 0.0, 0.0, 0.5, 0.5], {}, False),  # the last two windows count
    ([0.0, 0.0, 0.5, 0.5, 0.5, 0.5], {}, True),
    ([0.5, 0.5, 0.5], {}, False),  # fewer than two windows
    ([0.5, 0.5, 0.5], {"min_steps": 1}, False),
    ([0.5, 0.5, 0.5, 0.5, 0.5], {"min_steps": 6}, False),
    ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], {"min_steps": 6}, True),
    ([NAN] * 8, {}, False),  # undefined where all rewards of a batch are equal
    ([0.5, 0.5, NAN, NAN], {}, False),
    ([NAN, NAN, 0.5, 0.5], {}, False),
    ([NAN, 0.5, 0.5, NAN], {}, True),
    ([NAN, 0.1, 0.5, NAN], {}, False),
  ],
)
def test_explained_variance_has_plateaued(known, changes, ends):
  config, step = make_config(**changes), len(known) + 1
  assert phases.plateaued(config, step, known) == ends
  assert phases.plateaued(config, step, [*known, 100.0]) == ends  # of the step just made nothing is known yet


def test_it_ends_early_stays_ended_and_training_knows(tmp_path, monkeypatch):
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  config = make_config(plateau_gain=1e6)
  result = loop.pretrain_value(config, tmp_path)
  assert 5 <= result.step < 40 and not result.interrupted
  before = read_metrics(tmp_path)
  assert [line["step"] for line in before] == list(range(1, result.step + 1))
  assert loop.pretrain_value(config, tmp_path).step == result.step and read_metrics(tmp_path) == before

  said = []
  monkeypatch.setattr(logging, "warning", lambda message, *arguments: said.append(message % arguments))
  learner = setup.make_learner(config)
  for changes, told in [
    ({"plateau_gain": 1e6}, 0),
    ({"max_steps": result.step, "min_steps": 40}, 0),
    ({"min_steps": 40}, 1),
  ]:
    later = make_config(**changes)
    phases.initial_state(later, learner, tmp_path, phases.reinforcement_learning(later))
    assert len(said) == told
  assert (
    f"Value pretraining stopped at step {result.step} of at most 40" in said[0] and "launch.pretrain_value" in said[0]
  )
