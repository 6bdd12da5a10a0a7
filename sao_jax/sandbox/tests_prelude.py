"""The beginning of a graded run, as a script inside a sandbox: hidden tests follow, then a line that says they passed.

Programs under test run as processes of their own. This one never imports their code, has neither a file nor a command
line with a secret, and no other process may look into it.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

WORK = "/workspace"
CALL_TIMEOUT = 10.0  # seconds
PR_SET_DUMPABLE = 4
# Runs in a process of its own: one call, whose result goes to the pipe that was standard output. No bytecode is read:
# that of a file rewritten within a second may be stale.
CALLED = """
import importlib, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
module, function, arguments = json.load(sys.stdin)
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode, sys.pycache_prefix = True, "/nowhere"
answers.write(json.dumps(getattr(importlib.import_module(module), function)(*arguments)))
answers.flush()
os._exit(0)
"""


def hide_from_others() -> None:
  """Keeps other processes of the same user from looking into this one; the first thing that a graded run does."""
  ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def call(module: str, function: str, *arguments: Any, timeout: float = CALL_TIMEOUT) -> Any:
  """Calls a function of a module in the work folder, in a new process; arguments and result are values of JSON.

  Raises:
    AssertionError: it raised, ended its process, took too long, or returned what JSON does not know.
  """
  text = json.dumps([module, function, arguments])
  answer = program([sys.executable, "-I", "-S", "-c", CALLED], text, timeout=timeout)
  try:
    return json.loads(answer)
  except ValueError as error:
    raise AssertionError(f"{module}.{function} gave no result") from error


def program(command: Sequence[str], text: str = "", *, timeout: float = CALL_TIMEOUT) -> str:
  """Runs a program in the work folder with `text` as its input; returns what it wrote to standard output.

  Raises:
    AssertionError: its exit status is not 0, or it took too long.
  """
  try:
    done = subprocess.run(
      command, input=text.encode("utf-8"), cwd=WORK, capture_output=True, timeout=timeout, check=True
    )
  except (subprocess.SubprocessError, OSError) as error:
    raise AssertionError(f"{command[0]}: {error}") from error
  return done.stdout.decode("utf-8", "replace")
