"""Methods by name: each is a run that the configuration lets pass, and stands in the README."""

from __future__ import annotations

import pathlib
import re

import pytest
from absl import flags
from toys import training_toy

from launch import _flags
from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.hints import hints
from sao_jax.configuration.methods import METHODS
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError

README = pathlib.Path(__file__).parents[2] / "sao_jax/algorithm/README.md"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_valid_run_of_which_every_field_has_an_effect(name):
  default = RunConfig(environment=training_toy.Parity())
  config = config_tree.replace(default, METHODS[name])
  validate(config, training=True)
  assert not list(hints(config))
  unchanged = [path for path, value in METHODS[name].items() if config_tree.get(default, path) == value]
  assert unchanged in ([], ["algorithm.policy_loss_reduction"])  # of what it builds on


def test_the_readme_names_all_of_them():
  table = README.read_text().split("## From")[0]
  assert re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))) == list(METHODS)


def test_a_method_does_not_keep_the_advantage_and_the_loss_of_another(tmp_path):
  """A configuration of GRPO with --method=sao trains SAO, and with --method=grpo_dis has no clip of PPO's."""
  other = tmp_path / "grpo.py"
  other.write_text(
    "from sao_jax.configuration import config_tree\n"
    "from sao_jax.configuration.methods import METHODS\n"
    "from configs import calculator\n"
    "def get_config():\n"
    "  return config_tree.replace(calculator.get_config(), METHODS['grpo'])\n"
  )
  under = lambda name: _flags.read(["program", f"--config={other}", f"--method={name}"], flags.FlagValues()).config
  told = lambda config: (config.algorithm.advantage, config.algorithm.policy_loss)
  assert told(under("sao")) == ("sao", "dis") and under("sao").algorithm.policy_loss_reduction == "token_mean"
  assert told(under("grpo_dis")) == ("grpo", "dis") and told(under("vapo")) == ("sao", "ppo")


def read(*arguments: str):
  config = README.parents[2] / "configs/calculator.py"
  return _flags.read(["program", f"--config={config}", *arguments], flags.FlagValues())


def test_a_command_line_sets_a_method_and_flags_beside_it_win():
  given = read("--method=dapo", "--config.algorithm.epsilon_high=0.3")
  assert given.config.rollout.filter_equal_groups and given.config.algorithm.epsilon_high == 0.3
  assert given.config.algorithm.epsilon_low == 0.2
  assert given.explicit == {*METHODS["dapo"]}
  assert read("--method=sao").config == read().config
  with pytest.raises(ConfigError, match=r"(?s)--method.*'dapoo'.*Did you mean 'dapo'"):
    read("--method=dapoo")
