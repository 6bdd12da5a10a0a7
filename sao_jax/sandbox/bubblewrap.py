"""The local sandbox: bubblewrap's namespaces around a supervisor that starts one command after another.

Files lie in memory, in file systems that the sandbox alone sees. With its first process all others end, and with the
last of them everything that it ever wrote: however this process ends, nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sao_jax.episode import InfrastructureFailure
from sao_jax.sandbox import supervisor
from sao_jax.sandbox.bubblewrap_command import ACCOUNTS, SYSTEM, View, check_bubblewrap, sandbox_command
from sao_jax.sandbox.contract import (
  DEFAULT_LIMITS,
  FILE_TIMEOUT,
  NAME,
  CommandResult,
  FileRefused,
  ProcessEnd,
  SandboxLimits,
  check_path,
  check_timeout,
)
from sao_jax.sandbox.streams import OutputBudget, read_bounded, write_all
from sao_jax.sandbox.syscall_filter import compile_filter

CLOSED = "it has been closed"
SILENT = "its supervisor did not answer"
START_TIMEOUT = 60.0  # seconds
GRACE = 10.0  # seconds for the supervisor to kill what it was told to
MAX_ANSWER = 65536  # bytes
ENVIRONMENT = {
  "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
  "HOME": supervisor.WORK,
  "TMPDIR": "/tmp",
  "LANG": "C.UTF-8",
  "PYTHONDONTWRITEBYTECODE": "1",  # that of a file rewritten within a second would be stale
}


class LocalSandbox:
  """A `Sandbox` on this machine, without docker, for root and for ordinary users; to be used on one event loop.

  >>> async def greet():
  ...   sandbox = await LocalSandbox.start()
  ...   try:
  ...     return (await sandbox.run(["echo", "hello"], timeout=60.0)).stdout
  ...   finally:
  ...     await sandbox.close()
  >>> asyncio.run(greet())
  b'hello\\n'

  Attributes:
    limits: of this sandbox.
    calls: how many commands and files were asked for.
  """

  def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, errors: int, limits: SandboxLimits):
    """Takes over what `start` has started."""
    self._process, self._control = process, control
    self._errors = errors  # what bubblewrap and the supervisor say
    # One that nobody has closed, because its event loop has ended, ends with its last reference.
    self._free = weakref.finalize(self, _free, process, control, errors)
    self._turn = asyncio.Lock()
    self._gone = ""  # why, once it is of no use any more
    self._held: LocalProcess | None = None
    self.limits, self.calls = limits, 0

  @staticmethod
  def check(view: View = SYSTEM) -> None:
    """Refuses a machine where no such sandbox can be made, by ConfigError; takes a moment, for before work starts."""
    check_bubblewrap(view)

  @classmethod
  async def start(cls, limits: SandboxLimits = DEFAULT_LIMITS, view: View = SYSTEM) -> LocalSandbox:
    """Starts a sandbox; it must be closed.

    Raises:
      InfrastructureFailure: it did not start. `check` says more about a machine where none ever starts.
    """
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    errors = os.memfd_create("errors", os.MFD_CLOEXEC)
    accounts = {name: _memory_file(text.encode("ascii")) for name, text in ACCOUNTS.items()}
    rules = compile_filter()
    seccomp = None if rules is None else _memory_file(rules)
    passed = [*accounts.values(), *([] if seccomp is None else [seccomp])]
    try:
      # In this thread, with which it is to end: another one might end earlier.
      process = subprocess.Popen(
        sandbox_command(view, limits, accounts, seccomp),
        stdin=theirs,
        stdout=errors,
        stderr=errors,
        env={},
        cwd="/",
        pass_fds=passed,
      )
    except OSError as error:
      control.close()
      os.close(errors)
      raise InfrastructureFailure(NAME, f"bubblewrap did not start: {error}") from error
    finally:
      theirs.close()
      for descriptor in passed:
        os.close(descriptor)
    sandbox = cls(process, control, errors, limits)

    # The supervisor says that it is there.
    try:
      async with asyncio.timeout(START_TIMEOUT):
        await sandbox._answer()
    except TimeoutError as error:
      await sandbox.close()
      raise InfrastructureFailure(NAME, f"did not start within {START_TIMEOUT:g} s") from error
    except BaseException:
      await sandbox.close()
      raise
    return sandbox

  async def run(
    self,
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    timeout: float,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
  ) -> CommandResult:
    """Runs a command, see `Sandbox.run`; one that cannot be started has exit status 126 and says why."""
    if not command:
      return CommandResult(supervisor.NOT_STARTED, b"", b"no command\n", False, "", 0, 0.0)
    request = _run_request(command, check_path(cwd or "."), environment)
    return await self._exchange(request, stdin, check_timeout(timeout), self.limits.output)

  async def start_process(
    self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
  ) -> LocalProcess:
    """Starts a command that goes on, see `ProcessSandbox`; one that cannot be started ends with exit status 126."""
    self._check_free()
    await self._turn.acquire()
    try:
      pipes = self._send(_run_request(command, ".", environment))
    except BaseException:
      self._turn.release()
      raise
    ended = self._end_of_process()
    ended.add_done_callback(lambda _: self._turn.release())
    self._held = LocalProcess(pipes, ended, self._kill_command, self._kill)
    return self._held

  async def write_file(self, path: str, data: bytes) -> None:
    """Writes a file and the folders above it, see `Sandbox.write_file`."""
    request = {"kind": "write", "what": path, "path": check_path(path)}
    self._check_file(path, await self._exchange(request, data, FILE_TIMEOUT, MAX_ANSWER))

  async def read_file(self, path: str, max_bytes: int) -> bytes:
    """Reads a whole file, see `Sandbox.read_file`."""
    request = {"kind": "read", "what": path, "path": check_path(path), "max_bytes": max_bytes}
    result = await self._exchange(request, b"", FILE_TIMEOUT, max_bytes + MAX_ANSWER)
    self._check_file(path, result)
    return result.stdout

  async def close(self) -> None:
    """Kills all that runs in it, and removes its folders; nothing happens the second time."""
    self._kill(CLOSED)
    await asyncio.to_thread(self._process.wait)
    async with self._turn:  # a call that was under way has seen the end of the socket, and has failed
      if self._held is not None:
        self._held.close_pipes()
      self._free()

  def _check_file(self, path: str, result: CommandResult) -> None:
    if result.exit_status == supervisor.REFUSED:
      said = result.stderr.decode("utf-8", "replace").strip()
      raise FileRefused(path, said.removeprefix(f"{path}: "))
    if result.exit_status != 0:
      raise FileRefused(path, f"it could not be read or written whole ({result.killed_for or result.exit_status})")

  def _check_free(self) -> None:
    if self._held is not None and not self._held.ended.done():
      raise RuntimeError("a process is held in this sandbox: nothing else runs there before it has ended")

  async def _exchange(self, request: dict[str, Any], stdin: bytes, timeout: float, output: int) -> CommandResult:
    """Hands a request and pipes to the supervisor, and waits for the end of all that it has started."""
    self._check_free()
    async with self._turn:
      budget = OutputBudget(output)
      begin = time.monotonic()
      in_write, out_read, error_read = self._send(request)
      waits = (
        self._answer(),
        read_bounded(out_read, budget),
        read_bounded(error_read, budget),
        write_all(in_write, stdin),
      )
      tasks = [asyncio.ensure_future(wait) for wait in waits]
      try:
        killed_for = await self._wait(tasks[0], budget, timeout)
        async with asyncio.timeout(GRACE):
          answer = await tasks[0]
          stdout, stderr = await asyncio.gather(*tasks[1:3])
      except TimeoutError:
        # Not even the kernel's SIGKILL was obeyed in time, on a machine that is in trouble. All of it goes.
        self._kill(SILENT)
        raise InfrastructureFailure(NAME, SILENT) from None
      except BaseException:
        self._kill("a call was cancelled or has failed")
        raise
      finally:
        for task in tasks:
          task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
      seconds = time.monotonic() - begin

    # Time and output were measured here; what the supervisor found comes from inside.
    end = _process_end(answer)
    killed_for = killed_for or end.killed_for or ("output" if budget.truncated else "")
    status = None if killed_for else end.exit_status
    timed_out = killed_for == "time"
    return CommandResult(status, stdout, stderr, timed_out, killed_for, budget.truncated, seconds)

  def _send(self, request: dict[str, Any]) -> tuple[int, int, int]:
    """Sends a request; returns the near ends of the pipes of standard input, output and error."""
    if self._gone:
      raise InfrastructureFailure(NAME, f"of no use any more: {self._gone}")
    self.calls += 1
    asked = _memory_file(json.dumps(request).encode("ascii"))
    (in_read, in_write), (out_read, out_write), (error_read, error_write) = (os.pipe() for _ in range(3))
    theirs = [asked, in_read, out_write, error_write]
    try:
      socket.send_fds(self._control, [supervisor.RUN], theirs)
    except OSError as error:
      for descriptor in (in_write, out_read, error_read):
        os.close(descriptor)
      self._kill("its supervisor has ended")
      raise InfrastructureFailure(NAME, f"the supervisor has ended: {error}") from error
    finally:
      for descriptor in theirs:
        os.close(descriptor)
    return in_write, out_read, error_read

  async def _wait(self, answer: asyncio.Task[Any], budget: OutputBudget, timeout: float) -> str:
    """Waits until the command ends, or has it killed; returns the limit of time or output that it overstepped."""
    exceeded = asyncio.ensure_future(budget.exceeded.wait())
    try:
      await asyncio.wait({answer, exceeded}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
      if answer.done():
        return ""
      self._kill_command()
      return "output" if budget.exceeded.is_set() else "time"
    finally:
      exceeded.cancel()

  def _end_of_process(self) -> asyncio.Future[ProcessEnd]:
    """Waits for the supervisor's answer by a callback: a task would be left over when an event loop ends."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[ProcessEnd] = loop.create_future()

    def read() -> None:
      loop.remove_reader(control)
      line = b""
      with contextlib.suppress(OSError):
        line = self._control.recv(MAX_ANSWER)
      try:
        ended.set_result(_process_end(self._read_answer(line)))
      except InfrastructureFailure as failure:
        ended.set_exception(failure)
        ended.exception()  # that nobody asks for it is right

    control = self._control.fileno()
    loop.add_reader(control, read)
    return ended

  async def _answer(self) -> dict[str, Any]:
    line = b""
    with contextlib.suppress(OSError):
      line = await asyncio.get_running_loop().sock_recv(self._control, MAX_ANSWER)
    return self._read_answer(line)

  def _read_answer(self, line: bytes) -> dict[str, Any]:
    if not line:
      self._kill("its supervisor has ended")
      said = os.pread(self._errors, 500, 0).decode("utf-8", "replace").strip()
      raise InfrastructureFailure(NAME, f"the supervisor has ended: {said or 'without a word'}")
    return json.loads(line)

  def _kill_command(self) -> None:
    """Has the supervisor kill the command, and all that it started."""
    with contextlib.suppress(OSError):  # it has ended by itself: the answer says so
      self._control.send(supervisor.KILL)

  def _kill(self, why: str) -> None:
    """Ends the first process, and so all of them; from now on every call fails."""
    self._gone = self._gone or why
    with contextlib.suppress(OSError):  # not closed: the event loop may wait for it
      self._control.shutdown(socket.SHUT_RDWR)
    self._process.kill()


class LocalProcess:
  """A process that a `LocalSandbox` holds, see `SandboxProcess`."""

  def __init__(
    self,
    pipes: tuple[int, int, int],
    ended: asyncio.Future[ProcessEnd],
    kill: Callable[[], None],
    kill_sandbox: Callable[[str], None],
  ):
    """Takes over what `LocalSandbox.start_process` has started.

    Args:
      pipes: near ends of standard input, output and error.
      ended: done when the supervisor says so.
      kill: has the supervisor kill the process.
      kill_sandbox: ends the sandbox, for a reason.
    """
    for descriptor in pipes:
      os.set_blocking(descriptor, False)
    self.stdin, self.stdout, self.stderr = pipes
    self._kill, self._kill_sandbox, self.ended = kill, kill_sandbox, ended
    self._close_pipes = weakref.finalize(self, _close_all, pipes)

  async def end(self) -> ProcessEnd:
    """Kills it with all that it started, see `SandboxProcess.end`."""
    if not self.ended.done():
      self._kill()
    try:
      async with asyncio.timeout(GRACE):
        return await asyncio.shield(self.ended)
    except TimeoutError:
      self._kill_sandbox(SILENT)
      raise InfrastructureFailure(NAME, SILENT) from None

  async def close(self) -> None:
    """Kills it and closes its pipes; a sandbox that is gone needs nothing more."""
    try:
      with contextlib.suppress(InfrastructureFailure):
        await self.end()
    finally:
      self.close_pipes()

  def close_pipes(self) -> None:
    """Closes the near ends of its pipes, once."""
    self._close_pipes()


def _free(process: subprocess.Popen[bytes], control: socket.socket, errors: int) -> None:
  """Ends a sandbox, if it has not ended, and closes what it had."""
  process.kill()
  control.close()
  os.close(errors)


def _close_all(descriptors: tuple[int, ...]) -> None:
  for descriptor in descriptors:
    os.close(descriptor)


def _run_request(command: Sequence[str], cwd: str, environment: Mapping[str, str] | None) -> dict[str, Any]:
  variables = ENVIRONMENT | dict(environment or {})
  return {"kind": "run", "what": command[0], "command": list(command), "cwd": cwd, "environment": variables}


def _process_end(answer: dict[str, Any]) -> ProcessEnd:
  """Reads what a supervisor says at the end of a command."""
  killed_for = answer["killed_for"] if answer["killed_for"] in ("memory", "disk") else ""
  return ProcessEnd(None if killed_for else answer["exit_status"], killed_for)


def _memory_file(data: bytes) -> int:
  """Makes a file in memory that nobody can change, positioned at its beginning."""
  descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  with open(os.dup(descriptor), "wb") as file:
    file.write(data)
  os.lseek(descriptor, 0, os.SEEK_SET)
  fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
  return descriptor
