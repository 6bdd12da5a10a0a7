"""What the README shows is what the tests run."""

from __future__ import annotations

import fnmatch
import pkgutil
import re

import jax
from toys import algorithm_toy
from toys.paths import REPOSITORY

from sao_jax.huggingface.published import size_table

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_environment_is_the_tested_one_and_short():
  source = (REPOSITORY / "tests" / "toys" / "readme_environment.py").read_text(encoding="utf-8").rstrip()
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
  from sao_jax.configuration import config_tree

  known = {path for path, _, _ in config_tree.leaves(get_config())}
  mentioned = set(re.findall(r"--config\.([a-z_.]+)=", README))
  assert mentioned and mentioned <= known


def test_the_metrics_it_explains_are_those_of_a_train_step():
  batch = algorithm_toy.pack(algorithm_toy.SPREAD, 16)
  step = algorithm_toy.train_step(algorithm_toy.CONFIG)
  _, metrics = jax.eval_shape(step, jax.eval_shape(algorithm_toy.train_state), batch)
  section = README.split("## What the metrics say")[1].split("\n## ")[0]
  cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
  explained = {key for cell in cells for key in re.findall(r"`([\w*]+)`", cell.replace("` … `", "`, `ratio_*`, `"))}
  unexplained = {key for key in metrics if not any(fnmatch.fnmatch(key, name) for name in explained)}
  assert not unexplained
  source = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "sao_jax").rglob("*.py"))
  unknown = {key for key in explained - metrics.keys() if "*" not in key and f'"{key}"' not in source}
  assert not unknown


def test_the_table_of_sizes_is_the_computed_one():
  assert f"\n\n{size_table()}\n\n" in README


def test_modules_and_functions_exist():
  names = set(re.findall(r"`(sao_jax(?:\.\w+)+)[`(]", README))
  assert {"sao_jax.chat.tool_calls.parse_hermes", "sao_jax.chat.tool_calls.parse_glm"} <= names
  for name in names:
    pkgutil.resolve_name(name)  # raises


def test_it_names_the_release_of_transformers_that_setup_asks_for():
  setup = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
  (wanted,) = re.findall(r'"hf": \["transformers>=([\d.]+),', setup)
  assert re.findall(r"GLM-5\.2 need transformers ≥ ([\d.]+):", README) == [wanted]


def test_no_placeholder_is_left():
  assert not re.findall(r"\b(?:TODO|TBD|[A-Z]+_FIGURES)\b", README)
