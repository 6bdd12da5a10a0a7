"""Settings of the algorithm that cannot work."""

from __future__ import annotations

import pytest
from toys import training_toy

from sao_jax.config import AlgorithmConfig
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("epsilon_low", 0.0),
    ("epsilon_low", 1.5),
    ("epsilon_high", 0.0),
    ("epsilon_high", float("nan")),
    ("gamma", 1.1),
    ("gamma", -0.1),
    ("alpha", 0.5),
    ("critic_lambda", 1.5),
    ("value_updates", 0),
    ("advantage_values", "during"),
    ("policy_lambda", 1.5),
    ("policy_lambda", "adaptive"),
    ("loss_length", 0),
    ("gae", "step"),
    ("truncation", "none"),
    ("value_head", "linear"),
    ("value_clip", -0.1),
    ("micro_batches", 0),
  ],
)
def test_settings_that_cannot_work_are_refused(field, value):
  with pytest.raises(ConfigError, match=f"algorithm.{field}"):
    validate(training_toy.replace(training_toy.get_config(), algorithm={field: value}), training=True)


@pytest.mark.parametrize("changes", [{"value_clip": 0.2}, {"value_bins": 5}, {"value_min": 1.0}])
def test_hl_gauss_settings_that_cannot_work_are_refused(changes):
  with pytest.raises(ConfigError, match="algorithm.value_"):
    algorithm = {"value_head": "hl_gauss"} | changes
    validate(training_toy.replace(training_toy.get_config(), algorithm=algorithm), training=True)


def test_a_lambda_for_each_segment_wants_credit_for_each_segment():
  change = lambda **algorithm: training_toy.replace(training_toy.get_config(), algorithm=algorithm)
  validate(change(lambda_length="segment", gae="segments"), training=True)
  with pytest.raises(ConfigError, match=r"algorithm.lambda_length: .*'token' goes on across segments"):
    validate(change(lambda_length="segment"), training=True)


@pytest.mark.parametrize(
  ("given", "cold", "pretrained"), [("auto", True, False), (True, True, True), (False, False, False)]
)
def test_advantages_are_whitened_where_the_critic_is_cold(given, cold, pretrained):
  algorithm = AlgorithmConfig(whiten_advantages=given)
  assert (algorithm.whitens(), algorithm.whitens(critic_pretrained=True)) == (cold, pretrained)
  assert not AlgorithmConfig(advantage="grpo").whitens()
