"""The commands of "Use your own model" in huggingface/README.md, as a new user pastes them into an empty folder."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from toys import parity, processes
from toys.paths import REPOSITORY

from sao_jax.huggingface.folder import HFFolder

pytestmark = pytest.mark.timeout(900)  # its commands have ten minutes

README = (REPOSITORY / "sao_jax" / "huggingface" / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Use your own model\n")[2].partition("\n## ")[0]
COMMANDS = "".join(re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL))


def paste(commands: str, folder: pathlib.Path) -> str:
  """What a shell that stops at the first failure prints, with this interpreter as `python`; pip is left out."""
  lines = [line for line in commands.splitlines() if not line.startswith("pip ")]
  script = "\n".join(["set -e", f'python() {{ "{sys.executable}" "$@"; }}', *lines])
  environment = processes.environment(PYTHONPATH=REPOSITORY, HF_HUB_OFFLINE=1, COLUMNS=80)
  done = subprocess.run(
    ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "Traceback" not in done.stderr, done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  parity.transformers()
  pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")
  folder = tmp_path_factory.mktemp("own_model")
  (folder / "stdout").write_text(paste(COMMANDS, folder), encoding="utf-8")
  return folder


def test_there_are_commands():
  assert re.findall(r"launch\.(\w+)", COMMANDS) == [
    *("tiny_checkpoint", "evaluate", "sft", "train", "evaluate", "sample", "convert_hf")
  ]


def test_the_first_evaluation_is_of_the_folder_and_the_second_of_the_run(folder):
  base, trained = (json.loads((folder / f"runs/own/evaluation_{name}.json").read_text()) for name in ("base", "train"))
  assert base["policy_version"] == 0 and trained["policy_version"] > 0
  assert trained["heldout_reward"] > base["heldout_reward"]


def test_transformers_says_what_the_run_says(folder):
  stdout = (folder / "stdout").read_text(encoding="utf-8")
  (said,) = re.findall(r"^ +action \| (.+)$", stdout, re.MULTILINE)
  asked = stdout.partition("prompt | ")[2].partition("\n     action")[0]
  assert stdout.rstrip("\n").endswith(f"{asked}{said}") and said.startswith("<answer>")
  assert stdout.count(asked) == 2


def test_the_export_is_the_trained_model_without_a_missing_key(folder):
  import torch
  from transformers import AutoModelForCausalLM

  _, info = AutoModelForCausalLM.from_pretrained(folder / "models/trained", output_loading_info=True)
  assert not any(info.values()), info
  ids = torch.arange(9)[None]
  before, after = (
    AutoModelForCausalLM.from_pretrained(folder / "models" / name)(ids).logits for name in ("tiny", "trained")
  )
  assert torch.isfinite(after).all() and (before - after).abs().max() > 0.1
  tiny, trained = (HFFolder(folder / "models" / name) for name in ("tiny", "trained"))
  assert tiny.tensors.keys() == trained.tensors.keys()
  assert trained.fields == tiny.fields
  assert all(np.isfinite(trained.read(name)).all() for name in trained.tensors)
