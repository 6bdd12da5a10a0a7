"""What the README shows is what the tests run."""

from __future__ import annotations

import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_environment_is_the_tested_one_and_short():
  source = (REPOSITORY / "tests" / "readme_environment.py").read_text(encoding="utf-8").rstrip()
  assert source in README
  assert len(source.splitlines()) <= 40


def test_programs_files_and_keys_exist():
  for name in re.findall(r"`launch\.(\w+)`", README):
    assert (REPOSITORY / "launch" / f"{name}.py").exists(), name
  for path in re.findall(r"\]\(((?:configs|notebooks|launch|sao_jax)/[^)]+)\)", README):
    assert (REPOSITORY / path).exists(), path
  for path in re.findall(r"`((?:sao_jax|configs|launch)/[\w/]+\.\w+)`", README):
    assert (REPOSITORY / path).exists(), path


def test_every_override_it_mentions_is_a_field():
  from configs.calculator import get_config
  from sao_jax.training import config_tree

  known = {path for path, _, _ in config_tree.leaves(get_config())}
  mentioned = set(re.findall(r"--config\.([a-z_.]+)=", README))
  assert mentioned and mentioned <= known


def test_no_placeholder_is_left():
  assert not re.findall(r"\b(?:TODO|TBD|[A-Z]+_FIGURES)\b", README)
