"""The sandbox's contract: its protocol, the limits that hold in it, and the result of a command."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from sao_jax.errors import ConfigError

KilledFor = Literal["", "time", "memory", "disk", "output"]
MIB = 2**20

NAME = "sandbox"  # in failures
FILE_TIMEOUT = 60.0  # seconds for a file to be read or written


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
  """The limits of one sandbox; each of them holds at any time, for all that runs in it together.

  Attributes:
    memory: bytes of all processes together, and of the writable data of each one.
    processes: processes and threads at a time.
    disk: bytes in the work folder; /tmp and /dev/shm take as much again, each.
    files: files and folders in each of the three.
    file_bytes: bytes of one file.
    output: bytes that one command may write to standard output and error together.
    open_files: descriptors of one process.
  """

  memory: int = 1024 * MIB
  processes: int = 128
  disk: int = 256 * MIB
  files: int = 20000
  file_bytes: int = 256 * MIB
  output: int = MIB
  open_files: int = 256

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"SandboxLimits.{field.name}", f"{value!r} is no limit.", "Use an integer of at least 1.")


DEFAULT_LIMITS = SandboxLimits()


@dataclasses.dataclass(frozen=True)
class CommandResult:
  """The end of one command.

  Attributes:
    exit_status: as a shell counts, except that a signal's is negative; None if the sandbox ended the command.
    stdout, stderr: what it wrote, up to the limit.
    timed_out: True if `killed_for` is "time".
    killed_for: the limit that it overstepped, for which everything in the sandbox was killed; "" if none.
    truncated: bytes that it wrote beyond the limit of output, before it was killed, and that are not kept.
    seconds: from the request to the end of the last process.
  """

  exit_status: int | None
  stdout: bytes
  stderr: bytes
  timed_out: bool
  killed_for: KilledFor
  truncated: int
  seconds: float


class FileRefused(Exception):
  """A file that cannot be read or written: not there, too large, outside of the work folder, or no plain file.

  That is the fault of whoever named the path, and no failure of the sandbox.
  """

  def __init__(self, path: str, problem: str):
    self.path, self.problem = path, problem
    super().__init__(f"{path!r}: {problem}")


class Sandbox(Protocol):
  """A work folder of its own, and commands that run in it, one at a time.

  Nothing that `run` started outlives the call: background processes are killed when the command itself ends.
  The work folder lives until `close`. A call that is cancelled closes the sandbox.

  Every call raises an InfrastructureFailure when the sandbox is gone.
  """

  async def run(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout: float,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
  ) -> CommandResult:
    """Runs a command for at most `timeout` seconds.

    Args:
      command: a program and its arguments; no shell reads them.
      stdin: its whole standard input.
      timeout: seconds, from the moment that the sandbox takes it up.
      cwd: a folder below the work folder, by default the work folder itself.
      environment: variables beside those of the sandbox; nothing of this process's own variables is seen.

    Raises:
      FileRefused: for a `cwd` outside of the work folder.
    """
    ...

  async def write_file(self, path: str, data: bytes) -> None:
    """Writes a file and the folders above it.

    Raises:
      FileRefused: for a path outside of the work folder, through a symlink, or of anything but a plain file.
    """
    ...

  async def read_file(self, path: str, max_bytes: int) -> bytes:
    """Reads a whole file.

    Raises:
      FileRefused: as for `write_file`, for a file that is not there, and for one of more than `max_bytes`.
    """
    ...

  async def close(self) -> None:
    """Kills all that runs in it, and removes its folders; nothing happens the second time."""
    ...


@dataclasses.dataclass(frozen=True)
class ProcessEnd:
  """The end of a process.

  Attributes:
    exit_status: as a shell counts, except that a signal's is negative; None if a limit ended it.
    killed_for: the limit of memory or disk that was overstepped; "" if none was.
  """

  exit_status: int | None
  killed_for: KilledFor


class SandboxProcess(Protocol):
  """A command that goes on behind three pipes; until it has ended, its sandbox does nothing else.

  What it starts may go on beside it, and ends with it. Time and output are bounded by whoever holds it, all other
  limits by the sandbox.

  Attributes:
    stdin, stdout, stderr: descriptors of the near ends of its pipes, which never block.
    ended: done when it has ended with all that it started; its result is a `ProcessEnd`, or an InfrastructureFailure.
  """

  stdin: int
  stdout: int
  stderr: int
  ended: asyncio.Future[ProcessEnd]

  async def end(self) -> ProcessEnd:
    """Kills it, if it has not ended by itself, and all that it started; what they wrote can still be read.

    Raises:
      InfrastructureFailure: the sandbox is gone.
    """
    ...

  async def close(self) -> None:
    """Kills it, whatever state it is in, and closes its pipes; nothing happens the second time."""
    ...


class ProcessSandbox(Sandbox, Protocol):
  """A sandbox that can hold a process beyond a call, as a session with an interpreter needs it."""

  @property
  def limits(self) -> SandboxLimits:
    """The limits of the sandbox."""
    ...

  async def start_process(
    self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
  ) -> SandboxProcess:
    """Starts a command in the work folder. Another call of the sandbox, before it has ended, is a RuntimeError.

    Raises:
      InfrastructureFailure: the sandbox is gone.
    """
    ...


def check_path(path: str) -> str:
  """Returns a path below the work folder as it is.

  Raises:
    FileRefused: an absolute one, one with "..", or none at all.
  """
  parts = path.split("/")
  if not path or path.startswith("/") or ".." in parts or "\0" in path:
    raise FileRefused(path, "a path is relative to the work folder, and stays below it")
  return path


def check_timeout(timeout: float) -> float:
  """Returns a number of seconds as it is; refuses one that is no time-out, by ConfigError."""
  if not 0.0 < timeout < math.inf:
    raise ConfigError("timeout", f"{timeout} s is no time-out.", "Use a finite number of seconds above 0.")
  return timeout
