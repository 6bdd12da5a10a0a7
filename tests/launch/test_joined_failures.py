"""Two processes, of which one meets something alone: the other learns of it wherever it waits, and ends likewise."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from toys import processes
from toys.paths import REPOSITORY, TESTS

SECONDS = 60.0  # far below what a library's barrier, or jax, would wait


def end_of(kind, folder):
  """(status, output) of both, once they have ended by themselves."""
  command = [str(TESTS / "toys" / "joined_failures.py"), kind, str(folder / "checkpoints")]
  began = time.monotonic()
  ended = processes.finish_joined(processes.start_joined(2, command, folder, devices=1), folder, timeout=200)
  assert time.monotonic() - began < SECONDS
  return ended


@pytest.mark.timeout(300)
def test_damage_of_one_is_passed_over_by_all_and_its_full_disk_ends_all(tmp_path):
  ended = end_of("damage", tmp_path)
  assert [status for status, _ in ended] == [1, 1], ended
  for _, output in ended:
    assert "restored step 1 with host state {'step': 1}, True" in output
  assert "The checkpoint of step 2" in ended[1][1] and "cannot be read" in ended[1][1]
  assert "Process 1 has failed (CheckpointFailure: " in ended[0][1] and "No space left on device" in ended[0][1]


@pytest.mark.timeout(300)
def test_a_second_ctrl_c_ends_all_with_its_status(tmp_path):
  ended = end_of("interrupt", tmp_path)
  assert [status for status, _ in ended] == [130, 130], ended
  assert ended[0][1].endswith("Interrupted.\n") and "Traceback" not in ended[0][1] + ended[1][1]
  assert "Process 0 has failed (it was ended by SIGINT)" in ended[1][1]


@pytest.mark.timeout(300)
def test_one_with_nothing_to_do_stays_until_all_are_done(tmp_path):
  ended = end_of("idle", tmp_path)
  assert [status for status, _ in ended] == [0, 0], ended
  assert ended[1][1].endswith("done\n")


@pytest.mark.timeout(300)
def test_one_that_keeps_the_store_of_all_is_killed_and_the_others_say_so_last(tmp_path):
  ended = end_of("killed", tmp_path)
  assert [status for status, _ in ended] == [-signal.SIGKILL, 1], ended
  assert "Process 0 has died without a word" in ended[1][1].splitlines()[-1]


def test_bad_input_of_one_before_they_have_joined_ends_all():
  command = ["-m", "launch.convert_hf"]
  variables = processes.joining_variables(2, 1)
  options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": REPOSITORY}
  started = [
    subprocess.Popen([sys.executable, *command, *flags], env=each, **options)
    for each, flags in zip(variables, (["--hf=a", "--output=b"], ["--nix=1"]), strict=True)
  ]
  outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
  assert [process.returncode for process in started] == [2, 2], outputs
  assert outputs[0].startswith("error: Process 1 has failed before all had joined (ConfigError: ")
  assert ["nix" in output and "Traceback" not in output for output in outputs] == [True, True]
