"""The scripts: the quickstart stops where it is interrupted, and virtual environments without pip get one."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "launch" / "quickstart.sh"


def test_an_interrupt_ends_the_script_with_the_program(tmp_path):
  """The script's own trap and loop, around programs that save and exit with 0 when interrupted, as the launchers do."""
  text = SCRIPT.read_text(encoding="utf-8")
  trap = re.search(r"^trap .*$", text, re.MULTILINE)[0]
  loop = text[text.index("for program in") : text.index("done") + len("done")]
  program = tmp_path / "program"
  program.write_text(
    "#!/usr/bin/env bash\n"
    f'echo "$2" >> {tmp_path}/started\n'
    "trap 'exit 0' INT\n"
    "for _ in $(seq 300); do sleep 0.1; done\n"
  )
  program.chmod(0o755)
  script = f'set -euo pipefail\npython="{program}"\nworkdir={tmp_path}\n{trap}\n{loop}\n'
  process = subprocess.Popen(
    ["bash", "-c", script],
    start_new_session=True,
    stdout=subprocess.DEVNULL,
    # Tests that run in the background inherit an ignored SIGINT, which bash cannot trap.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  )
  started = tmp_path / "started"
  deadline = time.monotonic() + 30
  while not started.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  time.sleep(0.3)
  os.killpg(process.pid, signal.SIGINT)
  try:
    assert process.wait(timeout=30) == 75
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
  assert started.read_text().split() == ["launch.sft"]


@pytest.mark.parametrize("has_ensurepip", [True, False])
def test_a_virtual_environment_without_pip_gets_it_or_is_refused_with_a_remedy(tmp_path, has_ensurepip):
  """A stand-in for its Python, which has a pip only after ensurepip ran, and installs nothing."""
  python = tmp_path / "bin" / "python"
  python.parent.mkdir()
  python.write_text(
    "#!/usr/bin/env bash\n"
    f'cd {tmp_path}; echo "$*" >> calls\n'
    'case "$*" in\n'
    f'  "-m ensurepip"*) {"touch pip" if has_ensurepip else "false"} ;;\n'
    '  "-m pip"*) [[ -e pip ]] ;;\n'
    "esac\n"
  )
  python.chmod(0o755)
  done = subprocess.run(
    ["bash", "-euo", "pipefail", "-c", f'source "{SCRIPT.parent}/_environment.sh"; use_environment envs; echo ready'],
    env=os.environ | {"VIRTUAL_ENV": str(tmp_path)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  calls = [line.split()[1:3] for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("-m")]
  if has_ensurepip:
    assert done.returncode == 0 and done.stdout.endswith("ready\n"), done.stderr
    assert calls == [["pip", "--version"], ["ensurepip", "--upgrade"], ["pip", "install"]]
  else:
    assert done.returncode == 1 and "ready" not in done.stdout
    assert calls == [["pip", "--version"], ["ensurepip", "--upgrade"]]
    assert "has no pip" in done.stderr and "remedy:" in done.stderr
    assert not list(tmp_path.glob(".sao_jax-*"))
