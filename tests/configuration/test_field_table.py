"""No field of the configuration without a line that says where it must be seen."""

from __future__ import annotations

import pytest
from toys.paths import REPOSITORY
from toys.wired_fields import FIELDS, RUNS

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree


def test_every_field_has_a_line():
  paths = [path for path, _, _ in config_tree.leaves(RUNS["first"]) if not path.startswith("environment.")]
  covered = [path for path in paths if any(path == row or path.startswith(f"{row}.") for row in FIELDS)]
  assert covered == paths, "add a line to FIELDS of tests/toys/wired_fields.py"


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_is_tried_with_another_value_than_its_default_or_tested_elsewhere(path):
  if FIELDS[path].seen_by:
    assert path.rpartition(".")[2] in (REPOSITORY / FIELDS[path].seen_by).read_text(encoding="utf-8")
  else:
    default = config_tree.get(RunConfig(environment=None), path)
    assert FIELDS[path].uses and any(config_tree.get(config, path) != default for config in RUNS.values())
