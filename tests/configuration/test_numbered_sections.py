"""Fields of the parts of a mixture: named by number on the command line, listed, recorded and compared."""

from __future__ import annotations

import dataclasses

import pytest
from absl import flags

from launch import _flags
from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.listing import listing
from sao_jax.configuration.run_record import check_viewed, read_config, write_config
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.errors import ConfigError

OTHER = Calculator(name="other")
PARTS = (Part(SimulatedLatency(Calculator()), 2), Part(OTHER, 1, reward_scale=0.5))
BASE = RunConfig(environment=Mixture(PARTS), name="mixed")


@pytest.fixture
def recorded(tmp_path):
  write_config(BASE, tmp_path)
  return tmp_path


def read(workdir, *arguments):
  return _flags.read(["launcher", f"--workdir={workdir}", *arguments], flags.FlagValues(), viewing=True)


def test_a_field_of_a_part_is_set_by_its_number(recorded):
  given = read(
    recorded,
    "--config.environment.parts.1.weight=3",
    "--config.environment.parts.1.reward_scale=2",
    "--config.environment.parts.0.environment.inner.max_operand=4",
  )
  first, second = given.config.environment.parts
  assert (first.weight, second.weight, second.reward_scale) == (2, 3, 2.0) and isinstance(second.reward_scale, float)
  assert first.environment.inner == dataclasses.replace(Calculator(), max_operand=4)
  assert (first.environment.mean, second.environment) == (1.0, OTHER)
  assert config_tree.get(given.config, "environment.parts.0.environment.inner.max_operand") == 4

  # What was set on purpose may differ from the run; what was not is refused by its path.
  check_viewed(given.config, recorded, given.explicit)
  with pytest.raises(ConfigError, match=r"environment\.parts\.0\.environment\.inner\.max_operand=.* has 4"):
    check_viewed(given.config, recorded)
  assert read_config(recorded) == BASE


@pytest.mark.parametrize(
  "argument, field, says",
  [
    ("parts.2.weight=3", "environment.parts.2.weight", "there is no '2' of 2.*from 0 to 1"),
    ("parts.-1.weight=3", "environment.parts.-1.weight", "there is no '-1' of 2"),
    ("parts.0=3", "environment.parts.0", "it is a section.*parts.0.environment, environment.parts.0.weight"),
    ("parts=()", "environment.parts", "it is a tuple of sections.*environment.parts.1.reward_scale"),
    ("parts.0.wait=3", "environment.parts.0.wait", "Did you mean environment.parts.0.weight"),
    ("parts.0.weight=1.5", "environment.parts.0.weight", "expected int"),
    ("parts.0.weight=-1", "environment.parts.0.weight", "is no weight"),
    ("parts.1.environment.max_operan=1", "environment.parts.1.environment.max_operan", "Did you mean .*max_operand"),
  ],
)
def test_a_path_that_leads_to_no_field_is_refused_by_name(recorded, argument, field, says):
  with pytest.raises(ConfigError, match=f"(?s){says}") as error:
    read(recorded, f"--config.environment.{argument}")
  assert error.value.field == field


def test_all_fields_of_the_parts_are_listed_and_changes_are_marked():
  changed = config_tree.replace(BASE, {"environment.parts.0.weight": 5})
  lines = listing(changed, BASE).splitlines()
  assert "environment.parts.0: One environment of a mixture." in lines
  (index,) = (number for number, line in enumerate(lines) if line.startswith("* "))
  assert lines[index].startswith("* environment.parts.0.weight = 5") and "was 2" in lines[index + 1]
  assert any(line.startswith("  environment.parts.1.environment.max_operand = ") for line in lines)


def test_types_and_bounds_are_looked_at_within_the_parts():
  @dataclasses.dataclass(frozen=True)
  class Named:
    sections: tuple[Part, ...] = (Part(Calculator(name=7)),)

  with pytest.raises(ConfigError, match="sections.0.environment.name: got 7"):
    config_tree.check_types(Named())


def test_other_numbers_of_parts_are_one_difference():
  fewer = dataclasses.replace(BASE, environment=Mixture(PARTS[:1]))
  found = config_tree.differences(config_tree.to_json(BASE), config_tree.to_json(fewer))
  assert [path for path, _, _ in found] == ["environment.parts"]
