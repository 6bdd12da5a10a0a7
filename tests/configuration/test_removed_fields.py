"""Fields that there once were: the error names the new one, and runs that were begun with them go on."""

from __future__ import annotations

import json

import pytest

from launch import _flags
from sao_jax.configuration import config_tree, run_record
from sao_jax.environments.calculator import Calculator
from sao_jax.errors import ConfigError

OLD, NEW = "rollout.max_consecutive_failures", "rollout.outage_seconds"


def test_an_override_of_a_removed_field_names_the_new_one():
  config = _flags.load_config("configs/calculator.py")
  with pytest.raises(ConfigError, match="this field was removed") as error:
    config_tree.replace(config, {OLD: 20})
  assert error.value.field == OLD and NEW in error.value.remedy
  with pytest.raises(ConfigError, match=NEW):
    _flags.parse(["train", "--config=configs/calculator.py", "--workdir=runs/a", f"--config.{OLD}=20"])


def test_a_config_file_with_a_removed_field_is_told_the_new_one(tmp_path):
  path = tmp_path / "old.py"
  path.write_text(
    "from sao_jax import config\n"
    "def get_config():\n"
    "  return config.RunConfig(None, rollout=config.RolloutConfig(max_consecutive_failures=3))\n"
  )
  with pytest.raises(ConfigError, match=NEW) as error:
    _flags.load_config(str(path))
  assert error.value.field == "RolloutConfig.max_consecutive_failures"


def test_the_record_of_a_run_that_was_begun_with_it_can_be_compared_and_read(tmp_path):
  config = _flags.load_config("configs/calculator.py")
  assert isinstance(config.environment, Calculator)
  record = config_tree.to_json(config)
  del record["rollout"]["outage_seconds"]
  record["rollout"]["max_consecutive_failures"] = 20
  (tmp_path / run_record.CONFIG_FILE).write_text(json.dumps(record))
  run_record.check_same_run(config, tmp_path, begun=True)
  run_record.check_viewed(config, tmp_path)
  assert run_record.read_config(tmp_path) == config
