"""One small local sandbox for the tests of a module, and the reason to leave them out where none can be made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator

import pytest

from sao_jax.errors import ConfigError
from sao_jax.sandbox import LocalSandbox, SandboxLimits

MIB = 2**20
SMALL = SandboxLimits(
  memory=64 * MIB, processes=24, disk=4 * MIB, files=200, file_bytes=3 * MIB, output=100_000, open_files=64
)
PATIENT = 60.0  # seconds, for what takes a moment on a machine that is not busy


class Box:
  """A sandbox and its event loop: `box(coroutine)` runs one to its end."""

  def __init__(self, runner: asyncio.Runner, sandbox: LocalSandbox):
    self.runner, self.sandbox = runner, sandbox

  def __call__(self, coroutine):
    return self.runner.run(coroutine)

  def run(self, *command: str, timeout: float = PATIENT, **more):
    return self(self.sandbox.run(command, timeout=timeout, **more))

  def python(self, text: str, timeout: float = PATIENT):
    return self.run("python3", "-c", text, timeout=timeout)


@contextlib.contextmanager
def open_box(limits: SandboxLimits = SMALL) -> Iterator[Box]:
  """Starts a sandbox, or skips the test with the reason for which there can be none."""
  if missing():
    pytest.skip(missing())
  with asyncio.Runner() as runner:
    sandbox = runner.run(LocalSandbox.start(limits))
    try:
      yield Box(runner, sandbox)
    finally:
      runner.run(sandbox.close())


@functools.cache
def missing() -> str:
  """Says why there can be no local sandbox here; nothing where there can."""
  try:
    LocalSandbox.check()
  except ConfigError as error:
    return str(error)
  return ""
