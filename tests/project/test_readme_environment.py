"""The files and commands of "Add an environment" in environments/WRITE.md, as a new user saves and pastes them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
from toys import processes
from toys.paths import REPOSITORY

pytestmark = pytest.mark.timeout(900)  # its commands have ten minutes

README = (REPOSITORY / "sao_jax" / "environments" / "WRITE.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Add an environment\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
NAMES = re.findall(r"`(guess_number\w*\.py)`", SECTION.partition("```bash")[0])

# A user's run has more steps and two layers; that it learns is measured in the README.
FEW_STEPS = (
  "--config.training.steps=2",
  "--config.algorithm.critic_warmup_steps=1",
  "--config.model.num_layers=1",
  "--config.rollout.batch_size=8",
  "--config.sft.batch_size=8",
  "--config.rollout.row_counts=(16,)",
  "--config.sampler.num_slots=8",
  "--config.evaluation.every=0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with the two files, in which the commands have run."""
  folder = tmp_path_factory.mktemp("environment")
  for name, (_, block) in zip(NAMES, BLOCKS):
    (folder / name).write_text(block, encoding="utf-8")
  script = f'set -e\npython() {{ "{sys.executable}" "$@" {shlex.join(FEW_STEPS)}; }}\n{BLOCKS[2][1]}'
  environment = processes.environment(PYTHONPATH=REPOSITORY, COLUMNS=80)
  done = subprocess.run(
    ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "Traceback" not in done.stderr, done.stderr
  (folder / "stdout").write_text(done.stdout, encoding="utf-8")
  return folder


def test_there_are_two_files_and_the_commands():
  assert NAMES == ["guess_number.py", "guess_number_config.py"]
  assert [kind for kind, _ in BLOCKS] == ["python", "python", "bash"]
  assert re.findall(r"launch\.(\w+)", BLOCKS[2][1]) == ["train", "evaluate", "sample"]
  assert len(BLOCKS[1][1].splitlines()) <= 30


def test_it_trains(folder):
  lines = [json.loads(line) for line in (folder / "runs/guess_number/metrics.jsonl").read_text().splitlines()]
  trained = [line for line in lines if "policy_grad_norm" in line]
  assert trained[-1]["policy_version"] == 2 and trained[-1]["policy_updates_skipped"] == 0
  assert trained[-1]["rollouts_failed_environment"] == trained[-1]["rollouts_failed_infrastructure"] == 0


def test_it_is_measured_on_every_heldout_prompt(folder):
  result = json.loads((folder / "runs/guess_number/evaluation_train.json").read_text())
  assert result["policy_version"] == 2 and result["heldout_ungraded"] == 0
  assert result["heldout_trials"] == 123


def test_an_episode_is_shown(folder):
  stdout = (folder / "stdout").read_text(encoding="utf-8")
  assert re.search(r"prompt \| <\|bos\|><\|user\|>[1-8]{2,8}<\|end\|><\|assistant\|>", stdout)
  assert "action | " in stdout and "reward " in stdout
