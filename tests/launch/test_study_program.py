"""launch.study and launch.report as a user runs them, with real training runs."""

from __future__ import annotations

import json
import subprocess
import sys

from toys import processes
from toys.paths import REPOSITORY

STUDY = """
from sao_jax.configuration.methods import METHODS
from sao_jax.study import Study


def get_study():
  return Study(
    name="toy", question="Who is first?", config="tests/toys/training_toy.py", seeds=(3,), start=(),
    variants={"cispo": METHODS["cispo"] | {"rollout.group_size": 2}, "running_mean": METHODS["running_mean"]},
    fields={"training.steps": 3, "training.audit": False, "evaluation.every": 3, "evaluation.prompts": 8},
  )
"""


def run(program, *flags):
  return subprocess.run(
    [sys.executable, "-m", f"launch.{program}", *flags],
    cwd=REPOSITORY,
    env=processes.environment(PYTHONPATH=processes.NO_TORCH),
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


def test_a_study_is_run_reported_and_not_run_again(tmp_path):
  (tmp_path / "study.py").write_text(STUDY)
  arguments = (f"--suite={tmp_path / 'study.py'}", f"--output={tmp_path / 'out'}")
  first = run("study", *arguments)
  logs = [path.read_text() for path in tmp_path.glob("out/*/*/log.txt")]
  assert first.returncode == 0, (first.stderr, logs)
  rows = {row["variant"]: row for row in json.loads((tmp_path / "out/report/table.json").read_text())["rows"]}
  assert rows.keys() == {"cispo", "running_mean"} and all(row["costs"]["updates"] == 3 for row in rows.values())
  assert all(0.0 <= row["measures"]["heldout_success"]["mean"] <= 1.0 for row in rows.values())
  assert all(row["costs"]["sampled_tokens"] > 0 for row in rows.values())
  record = json.loads((tmp_path / "out/cispo/seed_3/study.json").read_text())
  assert record["fields"]["algorithm.policy_loss"] == "cispo" and len(record["commit"]) >= 40

  # Again: nothing is left to do. Its runs can be laid over one another, and a wrong variant is refused by name.
  again = run("study", *arguments)
  assert again.returncode == 0 and "begins" not in again.stderr
  overlay = run("report", *(str(tmp_path / f"out/{name}/seed_3") for name in rows), "--output", str(tmp_path / "both"))
  assert overlay.returncode == 0 and (tmp_path / "both/reward_mean.png").exists(), overlay.stderr
  wrong = run("study", *arguments, "--only=cisp")
  assert wrong.returncode == 2 and "cispo, running_mean" in wrong.stderr
