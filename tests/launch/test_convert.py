"""launch.convert_hf as a user runs it, in both directions."""

from __future__ import annotations

import subprocess
import sys

import pytest
from toys import hf_toy, processes
from toys.paths import REPOSITORY

from sao_jax.huggingface.convert import to_checkpoint


def run(*flags):
  command = [sys.executable, "-m", "launch.convert_hf", *flags]
  result = subprocess.run(
    command, cwd=REPOSITORY, env=processes.environment(), capture_output=True, text=True, timeout=300
  )
  return result.returncode, result.stdout + result.stderr


def test_there_and_back(tmp_path):
  folder, _ = hf_toy.make_folder(tmp_path / "hf", hf_toy.TIED)
  code, output = run(f"--hf={folder.path}", f"--output={tmp_path / 'checkpoint'}")
  assert code == 0, output
  code, output = run(f"--checkpoint={tmp_path / 'checkpoint'}", f"--output={tmp_path / 'back'}")
  assert code == 0, output
  assert "Wrote" in output and "orbax" not in output and "Traceback" not in output
  for file in folder.path.glob("*.safetensors*"):
    assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes()


def test_several_processes_export_together_what_one_does(tmp_path):
  """Each holds its part of the parameters only."""
  folder, _ = hf_toy.make_folder(tmp_path / "hf", hf_toy.TIED)
  to_checkpoint(folder.path, tmp_path / "checkpoint")
  command = ["-m", "launch.convert_hf", f"--checkpoint={tmp_path / 'checkpoint'}", f"--output={tmp_path / 'back'}"]
  ended = processes.finish_joined(processes.start_joined(2, command, tmp_path, devices=1), tmp_path)
  assert [status for status, _ in ended] == [0, 0], ended
  for file in folder.path.iterdir():
    assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
  "flags, field",
  [(("--hf=a", "--checkpoint=b"), "--hf"), (("--hf=nowhere",), "model.checkpoint")],
)
def test_bad_input_is_one_screen(tmp_path, flags, field):
  code, output = run(*flags, f"--output={tmp_path / 'out'}")
  assert code == 2 and f"error: {field}" in output and "remedy: " in output and "Traceback" not in output, output
