"""Seeds: every one that is accepted is another one; larger ones, of which only a part would be read, are refused."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from absl import flags
from toys import training_toy

from launch import _flags
from sao_jax.configuration import config_tree, validate
from sao_jax.environments.wrappers import Chaos, SimulatedLatency
from sao_jax.errors import ConfigError

LARGEST = 2**32 - 1
CONFIG = training_toy.get_config()


@pytest.mark.parametrize("path", ["training.seed", "evaluation.seed"])
def test_those_of_jax_have_32_bits(path):
  validate(config_tree.replace(CONFIG, {path: LARGEST}), training=True)
  for seed in (LARGEST + 1, 2**63, 10**30, -1):
    with pytest.raises(ConfigError, match=rf"{path}: {seed} is outside \[0, 4294967295\]"):
      validate(config_tree.replace(CONFIG, {path: seed}), training=True)


def test_all_that_are_accepted_differ():
  """The reason for the bound: jax reads the lowest 32 bits."""
  data = {tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in (0, 1, 2**31 - 1, 2**31, LARGEST)}
  assert len(data) == 5


@pytest.mark.parametrize("wrapper", [Chaos, SimulatedLatency])
def test_those_of_environments_are_not_negative(wrapper):
  config = dataclasses.replace(CONFIG, environment=wrapper(CONFIG.environment, seed=2**70))
  validate(config, training=True)
  with pytest.raises(ConfigError, match="environment.seed: -1 is too small"):
    validate(config_tree.replace(config, {"environment.seed": -1}), training=True)


def test_on_the_command_line():
  config, _ = _flags.parse(
    ["launcher", "--config=configs/calculator.py", "--workdir=x", f"--seed={2**64}"], flags.FlagValues()
  )
  with pytest.raises(ConfigError, match="training.seed: 18446744073709551616 is outside"):
    validate(config, training=True)
