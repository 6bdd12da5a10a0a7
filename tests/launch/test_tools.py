"""Programs without a configuration: one form of errors and help for all; and the list of programs."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from toys import processes
from toys.paths import REPOSITORY

from launch import __main__, _flags
from sao_jax.errors import ConfigError

TOOL = """
from absl import flags
from launch import _flags
from sao_jax.errors import ConfigError
_OUTPUT = flags.DEFINE_string("output", None, "What to write.", required=True)

def main():
  if _OUTPUT.value == "bad":
    raise ConfigError("--output", "it is bad.", "Name another.")
  print("made", _OUTPUT.value)

_flags.run_tool(main, example="--output=models/a")
"""


@pytest.mark.parametrize(
  "arguments, status, words",
  [
    (["--output=bad"], 2, "error: --output: it is bad.\n  remedy: Name another."),
    (["--outptu=x"], 2, "error: command line: Unknown command line flag 'outptu'. Did you mean: output?"),
    (["--output=x", "y"], 2, "unexpected 'y'.\n  remedy: Flags begin with --, as in --output=models/a."),
    (["-h"], 0, "What to write."),
  ],
)
def test_a_tool_has_the_errors_and_the_help_of_all_programs(tmp_path, arguments, status, words):
  (tmp_path / "tool.py").write_text(TOOL)
  done = subprocess.run(
    [sys.executable, str(tmp_path / "tool.py"), *arguments],
    env=processes.environment(PYTHONPATH=REPOSITORY), capture_output=True, text=True, timeout=120,
  )  # fmt: skip
  text = done.stdout + done.stderr
  assert done.returncode == status and words in text and "Traceback" not in text, text


def test_no_program_parses_its_flags_otherwise():
  programs = [path for path in (REPOSITORY / "launch").glob("[!_]*.py") if path.stem not in ("config", "compile_pod")]
  for path in programs:
    text = path.read_text()
    assert ("_flags.run(" in text or "_flags.run_tool(" in text) and "app.run" not in text, path


def test_an_output_that_cannot_be_made_is_refused_before_work(tmp_path):
  (tmp_path / "file").write_text("")
  for path in (f"{tmp_path}/file/a", "/proc/none/a", f"{tmp_path}/{'x' * 256}"):
    with pytest.raises(ConfigError, match="--output: cannot write"):
      _flags.check_output(path)
  _flags.check_output(f"{tmp_path}/new/a")
  assert pathlib.Path(tmp_path, "new").is_dir() and not pathlib.Path(tmp_path, "new", "a").exists()


def test_all_programs_are_listed(capsys):
  __main__.main()
  listed = capsys.readouterr().out
  for path in (REPOSITORY / "launch").glob("[!_]*.py"):
    assert f"launch.{path.stem} " in listed
  assert "Trains a policy and its critic with asynchronous SAO." in listed
