"""Predictions for SWE-bench in its official form, and their official score, where docker and the package are there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from sao_jax.configuration.paths import in_bucket
from sao_jax.evaluation.suite_data import SuiteData, has_fields
from sao_jax.evaluation.suite_episodes import SuiteEpisode

INSTANCE, PATCH = "instance_id", "model_patch"  # texts of a repository's episode
DATASET = "SWE-bench/SWE-bench_Verified"  # the images and scripts of the official harness are named there
HARNESS = "swebench.harness.run_evaluation"
HARNESS_FIELDS = ("image", "eval_script", "log_parser")  # which older files have not


def write_predictions(path: pathlib.Path, episodes: Iterable[SuiteEpisode], model: str) -> int:
  """Writes one line for each graded episode of a run, in the order of the problems; returns how many.

  Args:
    path: a .jsonl file.
    episodes: of one run: the harness takes one prediction of each instance.
    model: the name under which the harness files its logs and its report.
  """
  kept = [episode for episode in episodes if INSTANCE in episode.texts and PATCH in episode.texts]
  for_line = lambda texts: {"instance_id": texts[INSTANCE], "model_name_or_path": model, "model_patch": texts[PATCH]}
  lines = [json.dumps(for_line(each.texts)) for each in sorted(kept, key=lambda each: each.problem)]
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  return len(lines)


def dataset_of(data: SuiteData) -> str:
  """Names the data set for the harness: the file, if it has what the harness needs, or that on huggingface.co."""
  return data.path if len(data.files) == 1 and has_fields(data, *HARNESS_FIELDS) else DATASET


def harness_command(predictions: pathlib.Path, run_id: str, *, dataset: str = DATASET, workers: int = 4) -> list[str]:
  """Writes the command of the official harness, which makes a container for each prediction."""
  options = {"dataset_name": dataset, "split": "test", "predictions_path": predictions, "run_id": run_id}
  options |= {"max_workers": workers, "report_dir": predictions.parent}
  return [sys.executable, "-m", HARNESS, *(f"--{name}={value}" for name, value in options.items())]


def official_score(
  predictions: pathlib.Path, model: str, run_id: str, *, dataset: str = DATASET
) -> Mapping[str, Any] | None:
  """Has the official harness score a file of predictions; returns its report.

  None, and the log has the command to run elsewhere, where docker or the package is missing, or the harness fails.
  """
  command = harness_command(predictions, run_id, dataset=dataset)
  needed = {"a folder on a disk": not in_bucket(predictions), "docker": _has_docker(), "swebench": _has_package()}
  missing = [name for name, there in needed.items() if not there]
  if missing:
    said = "%s missing: these predictions are not scored here. With docker and `pip install swebench`, run:\n%s"
    logging.warning(said, " and ".join(missing), _portable(command))
    return None

  # It writes its logs below the current folder, and its report under the names of model and run.
  ended = subprocess.run(command, cwd=predictions.parent, check=False)
  report = predictions.parent / f"{model.replace('/', '__')}.{run_id}.json"
  if ended.returncode or not report.exists():
    logging.error("The harness of SWE-bench has failed (status %d): %s", ended.returncode, shlex.join(command))
    return None
  return json.loads(report.read_text(encoding="utf-8"))


def with_score(episodes: Iterable[SuiteEpisode], report: Mapping[str, Any] | None) -> list[SuiteEpisode]:
  """Gives the episodes of a run the official score as reward: 1 for what is resolved; NaN without a report."""
  resolved = set(report["resolved_ids"]) if report is not None else None
  reward = lambda texts: math.nan if resolved is None else float(texts.get(INSTANCE) in resolved)
  graded = lambda episode: dataclasses.replace(episode, reward=reward(episode.texts))
  return [graded(episode) if episode.outcome == "graded" else episode for episode in episodes]


def _has_docker() -> bool:
  """Tells if a docker daemon answers."""
  if shutil.which("docker") is None:
    return False
  asked = ["docker", "version", "--format={{.Server.Version}}"]
  with contextlib.suppress(subprocess.TimeoutExpired):  # of a remote one
    return subprocess.run(asked, capture_output=True, check=False, timeout=60).returncode == 0
  return False


def _has_package() -> bool:
  return importlib.util.find_spec("swebench") is not None


def _portable(command: list[str]) -> str:
  return shlex.join(["python", *command[1:]])
