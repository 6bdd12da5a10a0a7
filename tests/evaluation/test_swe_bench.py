"""Predictions for SWE-bench: read by the official loader, scored by the official command, or kept for elsewhere."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import pathlib
import subprocess
import types

import pytest
from toys import suite_toy

from sao_jax.evaluation import swe_bench
from sao_jax.evaluation.suite import SUITES
from sao_jax.evaluation.suite_data import find_data
from sao_jax.evaluation.suite_episodes import SuiteEpisode
from sao_jax.evaluation.suite_result import summarize

PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 'é\u2028'\n+x = 2\n"
RECORD = {
  "repo": "astropy/astropy", "base_commit": "d16bfe05", "patch": PATCH, "test_patch": PATCH, "hints_text": "",
  "problem_statement": "It is broken.", "created_at": "2022", "version": "4.3", "difficulty": "<15 min fix",
  "FAIL_TO_PASS": '["t.py::a"]', "PASS_TO_PASS": "[]", "environment_setup_commit": "298ccb47",
}  # fmt: skip
NAMES = [f"astropy__astropy-{number}" for number in range(4)]


def episodes():
  """One resolved, one not, one with nothing changed, and one that failed, in the order in which they ended."""
  said = {0: PATCH, 1: PATCH.replace("2", "3"), 2: ""}
  ended = [
    SuiteEpisode(number, 0, "graded", 0.0, "terminated", texts={"instance_id": NAMES[number], "model_patch": patch})
    for number, patch in said.items()
  ]
  return [SuiteEpisode(3, 0, "failed", reason="docker is down"), *reversed(ended)]


@pytest.fixture
def predictions(tmp_path):
  path = tmp_path / "predictions.0.jsonl"
  assert swe_bench.write_predictions(path, episodes(), "sao/run-300") == 3
  return path


def test_the_official_package_reads_the_predictions(predictions):
  pytest.importorskip("swebench", reason="the extra `swebench` is not installed")
  loader = importlib.import_module("swebench.harness.utils").get_predictions_from_file
  read = loader(str(predictions), "unused", "test")
  assert [each["instance_id"] for each in read] == NAMES[:3]
  assert {each["model_name_or_path"] for each in read} == {"sao/run-300"}
  assert read[0]["model_patch"] == PATCH and read[2]["model_patch"] == ""


def test_the_command_of_the_official_harness(predictions, tmp_path, monkeypatch):
  """It is recorded in place of being run: it needs docker, and images of gigabytes."""
  started = []

  def run(command, **options):
    started.append((command, options))
    if command[0] != "docker":
      report = {"total_instances": 500, "resolved_instances": 1, "resolved_ids": NAMES[:1]}
      (options["cwd"] / "sao__run-300.suite_0.json").write_text(json.dumps(report))
    return types.SimpleNamespace(returncode=0)

  monkeypatch.setattr(subprocess, "run", run)
  monkeypatch.setattr(swe_bench.shutil, "which", lambda name: name)
  monkeypatch.setattr(swe_bench, "_has_package", lambda: True)
  report = swe_bench.official_score(predictions, "sao/run-300", "suite_0")
  (docker, _), (command, options) = started
  assert docker[:2] == ["docker", "version"] and command[1:3] == ["-m", "swebench.harness.run_evaluation"]
  assert options["cwd"] == tmp_path
  assert {"--dataset_name=SWE-bench/SWE-bench_Verified", "--split=test", f"--predictions_path={predictions}"} < {
    *command
  }
  assert "--run_id=suite_0" in command and f"--report_dir={tmp_path}" in command

  # Its options are those of the package, as its source has them.
  found = importlib.util.find_spec("swebench")
  if found is not None:
    source = (pathlib.Path(found.origin).parent / "harness" / "run_evaluation.py").read_text()
    assert all(f'"{option.partition("=")[0]}"' in source for option in command[3:])

  # Resolved ones are the successes; what was not graded is none of them.
  result = summarize(SUITES["swe_bench_verified"], swe_bench.with_score(episodes(), report), 1)
  assert (result.mean, result.graded, result.ungraded) == (pytest.approx(1 / 3), 3, 1)


@pytest.mark.parametrize("docker, package, missing", [(None, True, "docker"), ("docker", False, "docker and swebench")])
def test_without_docker_or_the_package_the_command_is_told(predictions, monkeypatch, caplog, docker, package, missing):
  monkeypatch.setattr(swe_bench.shutil, "which", lambda name: docker)
  monkeypatch.setattr(subprocess, "run", lambda command, **options: types.SimpleNamespace(returncode=1))  # no daemon
  monkeypatch.setattr(swe_bench, "_has_package", lambda: package)
  with caplog.at_level(logging.WARNING):
    assert swe_bench.official_score(predictions, "sao/run-300", "suite_0") is None
  assert f"{missing} missing" in caplog.text
  assert "python -m swebench.harness.run_evaluation --dataset_name=SWE-bench/SWE-bench_Verified" in caplog.text
  result = summarize(SUITES["swe_bench_verified"], swe_bench.with_score(episodes(), None), 1)
  assert math.isnan(result.mean) and math.isnan(result.pass_at[1]) and result.graded == 3


def test_a_harness_that_fails_is_told_and_gives_no_score(predictions, monkeypatch, caplog):
  monkeypatch.setattr(swe_bench, "_has_docker", lambda: True)
  monkeypatch.setattr(swe_bench, "_has_package", lambda: True)
  monkeypatch.setattr(subprocess, "run", lambda command, **options: types.SimpleNamespace(returncode=1))
  assert swe_bench.official_score(predictions, "sao/run-300", "suite_0") is None
  assert "The harness of SWE-bench has failed (status 1)" in caplog.text


def test_the_published_files_are_found_and_only_newer_ones_are_given_to_the_harness(tmp_path):
  pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
  rows = [RECORD | {"instance_id": name} for name in NAMES]
  suite = SUITES["swe_bench_verified"]
  suite_toy.write_parquet(tmp_path / "old" / "data" / "test-00000-of-00001.parquet", rows)
  old = find_data(suite, str(tmp_path / "old"))
  assert old.count == 4 and swe_bench.dataset_of(old) == swe_bench.DATASET
  newer = {"image": "swebench/x:latest", "eval_script": "pytest", "log_parser": "parse_log_pytest", "eval_type": ""}
  suite_toy.write_parquet(tmp_path / "new" / "data" / "test-00000-of-00001.parquet", [row | newer for row in rows])
  new = find_data(suite, str(tmp_path / "new"))
  assert swe_bench.dataset_of(new) == new.path
