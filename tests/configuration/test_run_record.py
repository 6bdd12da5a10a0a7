"""config.json: written whole, compared with what is to go on from it or look at it, and read back as it was."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import pytest
from absl import logging
from toys import training_toy

from sao_jax.config import AlgorithmConfig, LoRAConfig, RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.rebuild import from_json, is_faithful
from sao_jax.configuration.run_record import CONFIG_FILE, check_same_run, check_viewed, read_config, write_config
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.reasoning_gym import ReasoningGym
from sao_jax.environments.wrappers import Chaos
from sao_jax.errors import ConfigError

BASE = RunConfig(environment=Chaos(Calculator(), raises=0.25))


@dataclasses.dataclass(frozen=True)
class Odd(training_toy.Parity):
  """What JSON cannot hold."""

  options: Mapping[Any, Any] = dataclasses.field(default_factory=dict)


def of(**values):
  return config_tree.replace(BASE, {name.replace("__", "."): value for name, value in values.items()})


@pytest.mark.parametrize(
  "config",
  [
    BASE,
    of(algorithm__epsilon_high=float("inf"), sampler__window_buckets=(16, 32), name="ü"),
    dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, lora=LoRAConfig(rank=4, targets=("mlp",)))),
    RunConfig(ReasoningGym("chain_sum", {"min_terms": 2, "names": ["a", {"b": None}]}, tokenizer_folder="x")),
    training_toy.get_config(),
  ],
)
def test_a_configuration_comes_back_as_it_was(tmp_path, config):
  write_config(config, tmp_path)
  assert read_config(tmp_path) == config
  assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


def test_fields_that_an_older_record_lacks_have_their_defaults():
  record = json.loads(json.dumps(config_tree.to_json(BASE)))
  del record["training"]["lock_seconds"], record["model"]["lora"]
  record["training"]["gone"] = 3
  assert from_json(record) == BASE


@pytest.mark.parametrize(
  "options", [{1: "a"}, {"a": (1, 2)}, {"a": object()}, {"a": {1, 2}}], ids=["key", "tuple", "object", "set"]
)
def test_what_json_cannot_hold_is_not_guessed(tmp_path, options):
  config = RunConfig(environment=Odd(options=options))
  assert not is_faithful(config) and is_faithful(RunConfig(environment=Odd(options={"a": [1]})))
  write_config(config, tmp_path)
  with pytest.raises(ConfigError, match="--config: it is missing, and .* could not hold all of it"):
    read_config(tmp_path)


@pytest.mark.parametrize(
  "change, words",
  [
    ({"module": "no_such_module_of_mine", "file": "/a/mine.py"}, "mine.py, which only --config may run"),
    ({"dataclass": "NoSuch"}, "NoSuch"),
    ({"module": "subprocess", "dataclass": "Popen"}, "no dataclass"),
    ({"dataclass": "Chaos.__init__"}, "no dataclass"),
    ({"raises": "often"}, "raises"),
  ],
)
def test_a_record_that_cannot_be_rebuilt_says_why_and_runs_no_file(tmp_path, change, words):
  record = config_tree.to_json(BASE)
  record["environment"] |= change
  (tmp_path / CONFIG_FILE).write_text(json.dumps(record))
  with pytest.raises(ConfigError, match=words) as error:
    read_config(tmp_path)
  assert error.value.field == "--config" and "--config=" in error.value.remedy


@pytest.mark.parametrize("text", [None, "{", "[]", ""])
def test_without_a_record_the_configuration_must_be_passed(tmp_path, text):
  if text is not None:
    (tmp_path / CONFIG_FILE).write_text(text)
  with pytest.raises(ConfigError, match="--config"):
    read_config(tmp_path)
  check_same_run(BASE, tmp_path, begun=True)  # there is nothing to compare with
  check_viewed(BASE, tmp_path)


def test_changes_are_said_and_another_run_is_refused(tmp_path, monkeypatch):
  said = []
  monkeypatch.setattr(logging, "warning", lambda message, *arguments: said.append(message % arguments))
  write_config(BASE, tmp_path)
  check_same_run(BASE, tmp_path, begun=True)
  assert not said
  check_same_run(of(algorithm__epsilon_low=0.5, training__seed=3), tmp_path, begun=False)
  assert len(said) == 2
  assert "algorithm.epsilon_low was 0.3, is 0.5" in said[0] and "training.seed was 0, is 3" in said[1]
  with pytest.raises(ConfigError, match="holds a run with training.seed=0, this one has 3"):
    check_same_run(of(training__seed=3), tmp_path, begun=True)


@pytest.mark.parametrize(
  "path, value",
  [("name", "b"), ("training.seed", 1), ("model.d_model", 32), ("environment.raises", 0.5), ("model.lora.rank", 3)],
)
def test_a_run_is_not_looked_at_with_the_configuration_of_another(tmp_path, path, value):
  write_config(BASE, tmp_path)
  other = config_tree.replace(BASE, {path: value})
  with pytest.raises(ConfigError, match=rf"--config: .*{path}=") as error:
    check_viewed(other, tmp_path)
  assert "Leave --config out" in error.value.remedy
  check_viewed(other, tmp_path, explicit=[path])


def test_another_environment_is_another_configuration_and_other_settings_of_the_looking_are_not(tmp_path):
  write_config(BASE, tmp_path)
  with pytest.raises(ConfigError, match="environment.dataclass='Chaos', this configuration has 'Calculator'"):
    check_viewed(dataclasses.replace(BASE, environment=Calculator()), tmp_path)
  fields = {"evaluation__prompts": 7, "sampler__num_slots": 3, "model__dtype": "bfloat16", "training__steps": 3}
  check_viewed(of(**fields), tmp_path)


def test_a_record_for_which_there_is_no_room_leaves_nothing_behind(tmp_path, monkeypatch):
  def replace(old, new):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", replace)
  with pytest.raises(OSError, match="No space left"):
    write_config(training_toy.get_config(), tmp_path)
  assert list(tmp_path.iterdir()) == []


def test_infinity_is_written_as_json_and_comes_back(tmp_path):
  """Not as `Infinity`, which other parsers refuse; records of older versions, which have it, are of the same run."""
  config = dataclasses.replace(BASE, algorithm=AlgorithmConfig(epsilon_high=math.inf))
  write_config(config, tmp_path)
  written = (tmp_path / "config.json").read_text()
  assert '"epsilon_high": "inf"' in written and "Infinity" not in written
  assert from_json(json.loads(written)) == config and is_faithful(config)
  older = json.loads(written.replace('"inf"', "Infinity"))
  assert config_tree.differences(older, config_tree.to_json(config)) == []
  assert config_tree.differences(older, config_tree.to_json(BASE)) == [("algorithm.epsilon_high", math.inf, 5.0)]
