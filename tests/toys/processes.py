"""Where the programs that tests start run: on one device, as at home, compiled as the tests are.

Compilation took most of the suite's time. A toy model's program runs for a millisecond however it is compiled, so XLA
is asked for its quickest code generation (a train step: 2.8 instead of 11.6 seconds of CPU time);
`launch/test.sh --optimized` compiles as production does.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from toys import fork_server
from toys.paths import REPOSITORY, TESTS

QUICK_COMPILATION = {"xla_backend_optimization_level": "0", "xla_cpu_use_fusion_emitters": "false"}
# Put on the path of a program, it saves the two seconds in which tensorboardX imports torch, where that is installed.
NO_TORCH = str(TESTS / "toys" / "no_torch")
DEVICES = "xla_force_host_platform_device_count"


def xla_flags(given: str, **wanted: str) -> str:
  """XLA_FLAGS with those that are wanted and not given yet."""
  return " ".join([*given.split(), *(f"--{name}={value}" for name, value in wanted.items() if name not in given)])


def environment(**more: object) -> dict[str, str]:
  """The environment variables of a program with one device; `more` are set, too."""
  flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if DEVICES not in flag]
  return os.environ | {"XLA_FLAGS": " ".join(flags)} | {name: str(value) for name, value in more.items()}


Process = subprocess.Popen | fork_server.Started


def start_joined(count: int, command: list[str], logs: pathlib.Path, *, devices: int = 2) -> list[Process]:
  """Starts a command in `count` processes that join each other on the loopback; their output goes to `logs`.

  The command is a script with its arguments, or a program as in ["-m", "launch.train"].
  """
  started = []
  for index, variables in enumerate(joining_variables(count, devices)):
    with (logs / f"process_{index}.log").open("w") as log:
      if command[0] == "-m":
        options = {"cwd": REPOSITORY, "env": variables, "stdout": log, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen([sys.executable, *command], **options))
      else:
        started.append(fork_server.start(*command, environment=variables, cwd=REPOSITORY, log=log))
  return started


def joining_variables(count: int, devices: int) -> list[dict[str, str]]:
  """The environment of each of `count` processes that join each other on the loopback, with simulated CPU devices."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  path = os.pathsep.join([str(REPOSITORY), str(TESTS), NO_TORCH])
  common = environment(JAX_PLATFORMS="cpu", PYTHONPATH=path, PYTHONFAULTHANDLER=1)
  common |= {"XLA_FLAGS": xla_flags("", **{DEVICES: str(devices)}, **QUICK_COMPILATION)}
  if count == 1:
    return [common]
  common |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
  return [common | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


def finish_joined(started: list[Process], logs: pathlib.Path, *, timeout: float = 550) -> list[tuple[int, str]]:
  """Waits for all of them; returns (exit status, output) of each. None is left behind.

  Those that still run after `timeout` seconds are ended by SIGABRT: their output closes with the stacks of all threads.
  """
  deadline = time.monotonic() + timeout
  try:
    for process in started:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(deadline - time.monotonic(), 0.1))
  finally:
    for process in started:
      _end(process)
  return [(each.returncode, (logs / f"process_{index}.log").read_text()) for index, each in enumerate(started)]


def _end(process: Process) -> None:
  """Ends a process that still runs, with the stacks of its threads as its last words where it has some."""
  if process.poll() is None:
    process.send_signal(signal.SIGABRT)
    try:
      process.wait(5)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()


def run_together(
  arguments: Sequence[str], processes: int = 2, *, devices: int = 4, seconds: float = 120, check: bool = True
) -> list[subprocess.CompletedProcess[str]]:
  """Runs `python *arguments` in several processes of one jax.distributed run, and returns how each ended.

  They find each other by the usual environment variables: `initialize_processes()`, or `jax.distributed.initialize` of
  them. Each has simulated CPU devices. After the time limit all that still run are ended, their stacks in stderr.

  Args:
    arguments: of the interpreter, as in ["-c", PROGRAM]; the same for all.
    processes: how many.
    devices: of each process.
    seconds: the time limit, for all together.
    check: asserts that all end with status 0.
  """
  command = [sys.executable, *arguments]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
  running = [subprocess.Popen(command, env=variables, **pipes) for variables in joining_variables(processes, devices)]

  # Small outputs: a process that waits for a full pipe would be ended with the time.
  end, done = time.monotonic() + seconds, []
  try:
    for process in running:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(end - time.monotonic(), 0.1))
  finally:
    for process in running:
      _end(process)
  for process in running:
    output, errors = process.communicate()
    done.append(subprocess.CompletedProcess(command, process.returncode, output, errors))
  for index, each in enumerate(done if check else ()):
    assert each.returncode == 0, f"process {index}: {each.stderr[-3000:]}"
  return done
