"""A process that compiles for TPUs without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from sao_jax.pod.chips import ENVIRONMENT

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu (extra `aot`) is not installed"
)


def answer_of(program: str, timeout: float = 300) -> Any:
  """The JSON in the last line that a program prints, in a process of its own.

  libtpu must not be loaded by the tests' CPU runtime, and it locks itself. It compiles with less optimization, in two
  thirds of the time: layouts, kernels and collectives are those of production, arrays are reused a little less.
  """
  quick = {"JAX_OPTIMIZATION_LEVEL": os.environ.get("JAX_OPTIMIZATION_LEVEL", "O1")}
  environment = os.environ | ENVIRONMENT | quick | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
  command = [sys.executable, "-c", program]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])
