"""The sandbox in a docker container, through docker's command line: for images with tools of their own.

The container's first process waits for the end of its standard input, which this process holds: it ends with us, and
docker removes it. Commands are another user's than that process, so that they can be killed all at once without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import posixpath
import secrets
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from sao_jax.episode import InfrastructureFailure
from sao_jax.errors import ConfigError
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
from sao_jax.sandbox.supervisor import WORK

USER = "65534:65534"
ENVIRONMENT = {"HOME": WORK, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}  # beside the image's own
MAX_ARGUMENT = 2**17  # bytes of one argument that Linux takes, with the zero behind it
NOT_RUN = 126  # exit status of a command that cannot be started
START_TIMEOUT = 300.0  # seconds; an image that is not there is pulled
CONTROL_TIMEOUT = 60.0  # seconds for docker itself
MAX_SAID = 65536  # bytes that docker itself may say
REFUSED = 125
KILLED = 128 + 9
KILLING = (0, 1, KILLED)  # exit statuses of a shell that kills all but itself, which may be nobody
FIRST = "echo ready; exec cat > /dev/null"
# A path is (folder, name), the folder as it is without symlinks; `refuse` says why and ends.
FILE = """refuse() { echo "$1" >&2; exit 125; }
cd -P -- "$1" 2>/dev/null || refuse "its folder is not there"
[ "$(pwd -P)" = "$1" ] || refuse "a symlink leads to it"
[ ! -L "./$2" ] || refuse "it is a symlink"
"""
READ = f"""{FILE}
[ -e "./$2" ] || refuse "No such file or directory"
[ -f "./$2" ] || refuse "it is no plain file"
size=$(wc -c < "./$2") || refuse "it cannot be read"
[ "$size" -le "$3" ] || refuse "it has $size bytes, more than $3"
cat "./$2"
"""
WRITE = f"""mkdir -p -- "$1" 2>/dev/null
{FILE}
[ ! -e "./$2" ] || [ -f "./$2" ] || refuse "it is no plain file"
cat > "./$2" || refuse "it cannot be written"
"""


class DockerSandbox:
  """A `Sandbox` in a container of one image, which has a shell and the usual small programs; for one event loop.

  Attributes:
    limits: of this sandbox.
    calls: how many commands and files were asked for.
  """

  def __init__(self, docker: str, name: str, first: subprocess.Popen[bytes], limits: SandboxLimits):
    """Takes over what `start` has started."""
    self._docker, self._name, self._first = docker, name, first
    self._turn = asyncio.Lock()
    self._gone = ""  # why, once it is of no use any more
    self._held: DockerProcess | None = None
    self.limits, self.calls = limits, 0

  @staticmethod
  def check() -> str:
    """Returns the path of docker's program; refuses a machine without it or its server, by ConfigError."""
    docker = shutil.which("docker")
    if docker is None:
      raise ConfigError("sandbox", "docker is not installed.", "Install it, or use the LocalSandbox.")
    asked = [docker, "version", "--format", "{{.Server.Version}}"]
    done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CONTROL_TIMEOUT)
    if done.returncode:
      problem = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
      raise ConfigError("sandbox", f"docker's server does not answer: {problem}.", "Start it, and join its group.")
    return docker

  @classmethod
  async def start(cls, image: str, limits: SandboxLimits = DEFAULT_LIMITS, hidden: Sequence[str] = ()) -> DockerSandbox:
    """Starts a container; it must be closed.

    Args:
      image: its image.
      limits: of all that runs in it.
      hidden: absolute paths of folders of the image that are empty inside.

    Raises:
      InfrastructureFailure: it did not start.
    """
    docker = shutil.which("docker")
    if docker is None:
      raise InfrastructureFailure(NAME, "docker is not installed", retryable=False)
    name = f"sao-jax-{secrets.token_hex(8)}"
    first = subprocess.Popen(
      container_command(docker, name, image, limits, hidden),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )
    sandbox = cls(docker, name, first, limits)
    try:
      async with asyncio.timeout(START_TIMEOUT):
        said = await asyncio.to_thread(first.stdout.readline)
    except BaseException as error:
      await sandbox.close()
      if isinstance(error, TimeoutError):
        raise InfrastructureFailure(NAME, f"no container within {START_TIMEOUT:g} s") from error
      raise
    if said.strip() != b"ready":
      problem = await asyncio.to_thread(first.stderr.read, 500)
      await sandbox.close()
      raise InfrastructureFailure(NAME, f"docker did not start it: {problem.decode('utf-8', 'replace').strip()}")
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
    """Runs a command, see `Sandbox.run`; one that cannot be started has exit status 126 or 127, as docker says."""
    folder = posixpath.normpath(f"{WORK}/{check_path(cwd or '.')}")
    options = [*_environment_options(environment), "--workdir", folder]
    return await self._exchange(options, list(command), stdin, check_timeout(timeout), self.limits.output)

  async def start_process(
    self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
  ) -> DockerProcess:
    """Starts a command that goes on, see `ProcessSandbox`."""
    self._check_free()
    await self._turn.acquire()
    try:
      # The pipes are docker's own program's, which passes on what comes and goes.
      words = self._exec_words([*_environment_options(environment), "--workdir", WORK], command)
      pipe = subprocess.PIPE
      program = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except BaseException as error:
      self._turn.release()
      if isinstance(error, OSError):
        raise InfrastructureFailure(NAME, f"docker did not start: {error}") from error
      raise
    self._held = DockerProcess(program, self._kill_all, self._clean_up)
    self._held.ended.add_done_callback(lambda _: self._turn.release())
    return self._held

  async def write_file(self, path: str, data: bytes) -> None:
    """Writes a file and the folders above it, see `Sandbox.write_file`."""
    await self._file(WRITE, path, [], data, MAX_SAID)

  async def read_file(self, path: str, max_bytes: int) -> bytes:
    """Reads a whole file, see `Sandbox.read_file`."""
    return (await self._file(READ, path, [str(max_bytes)], b"", max_bytes + MAX_SAID)).stdout

  async def close(self) -> None:
    """Removes the container, and all that runs in it; nothing happens the second time."""
    if self._gone == "it has been closed":
      return
    self._gone = "it has been closed"
    with contextlib.suppress(OSError):
      self._first.stdin.close()
    with contextlib.suppress(InfrastructureFailure):  # it has gone already
      await self._call(["rm", "--force", "--volumes", self._name])
    with contextlib.suppress(ProcessLookupError):
      self._first.kill()
    await asyncio.to_thread(self._first.wait)
    self._first.stdout.close()
    self._first.stderr.close()
    if self._held is not None:
      await self._held.close()

  async def _file(self, script: str, path: str, more: list[str], data: bytes, output: int) -> CommandResult:
    folder, name = posixpath.split(posixpath.normpath(f"{WORK}/{check_path(path)}"))
    command = ["sh", "-c", script, "sh", folder, name, *more]
    result = await self._exchange([], command, data, FILE_TIMEOUT, output)
    if result.exit_status != 0:
      said = result.stderr.decode("utf-8", "replace").strip() if result.exit_status == REFUSED else ""
      raise FileRefused(path, said or f"it could not be read or written whole ({result.exit_status})")
    return result

  async def _exchange(
    self, options: list[str], command: list[str], stdin: bytes, timeout: float, output: int
  ) -> CommandResult:
    """Runs `docker exec`, and kills afterwards whatever it has left behind."""
    self._check_free()
    if not all(map(_is_argument, (*command, *options))):
      return CommandResult(NOT_RUN, b"", b"an argument is too long, or no text\n", False, "", 0, 0.0)
    async with self._turn:
      words = self._exec_words(options, command)
      begin = time.monotonic()
      try:
        result = await run_bounded(words, stdin, timeout, output)
        out_of_memory = await self._clean_up(result.exit_status)
      except BaseException:
        self._gone = self._gone or "a call was cancelled or has failed"
        # Cancelled or not, nothing goes on in there.
        with contextlib.suppress(OSError):
          self._first.stdin.close()
        raise
    memory = not result.killed_for and result.exit_status == KILLED and out_of_memory
    changed = {"exit_status": None, "killed_for": "memory"} if memory else {}
    return dataclasses.replace(result, seconds=time.monotonic() - begin, **changed)

  def _exec_words(self, options: list[str], command: Sequence[str]) -> list[str]:
    """Begins a call: the command line that runs a command in the container."""
    if self._gone:
      raise InfrastructureFailure(NAME, f"of no use any more: {self._gone}")
    self.calls += 1
    return [self._docker, "exec", "--interactive", "--user", USER, *options, self._name, *command]

  def _check_free(self) -> None:
    if self._held is not None and not self._held.ended.done():
      raise RuntimeError("a process is held in this sandbox: nothing else runs there before it has ended")

  async def _kill_all(self) -> int | None:
    """Kills all that runs in the container but its first process; returns the exit status."""
    killing = await self._call(["exec", "--user", USER, self._name, "sh", "-c", "kill -9 -1"])
    return killing.exit_status

  async def _clean_up(self, exit_status: int | None) -> bool:
    """Kills what a command has left behind; tells if the kernel has killed for memory.

    Raises:
      InfrastructureFailure: the container has ended.
    """
    killing = await self._kill_all()
    running, out_of_memory = await self._state() if exit_status else (True, False)
    if not running:
      self._gone = "its container has ended"
      raise InfrastructureFailure(NAME, self._gone)
    if killing not in KILLING:
      # As many processes as the container may have leave no room for this one. They must not see what comes next.
      self._gone = "what a command has left behind could not be killed"
      with contextlib.suppress(OSError):
        self._first.stdin.close()
    return out_of_memory

  async def _state(self) -> tuple[bool, bool]:
    """Asks if the container runs, and if the kernel has killed in it for memory."""
    said = await self._call(["inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}", self._name])
    running, _, out_of_memory = said.stdout.decode("ascii", "replace").strip().partition(" ")
    return running == "true", out_of_memory == "true"

  async def _call(self, words: list[str]) -> CommandResult:
    result = await run_bounded([self._docker, *words], b"", CONTROL_TIMEOUT, MAX_SAID)
    if result.killed_for:
      raise InfrastructureFailure(NAME, f"docker {words[0]} took too long, or said too much")
    return result


class DockerProcess:
  """A process that a `DockerSandbox` holds, behind `docker exec`; see `SandboxProcess`."""

  def __init__(
    self,
    program: subprocess.Popen[bytes],
    kill_all: Callable[[], Awaitable[int | None]],
    clean_up: Callable[[int | None], Awaitable[bool]],
  ):
    """Takes over what `DockerSandbox.start_process` has started."""
    self._program, self._kill_all, self._clean_up = program, kill_all, clean_up
    self.stdin, self.stdout, self.stderr = (pipe.fileno() for pipe in (program.stdin, program.stdout, program.stderr))
    for descriptor in (self.stdin, self.stdout, self.stderr):
      os.set_blocking(descriptor, False)

    # By a callback: a task would be left over when an event loop ends.
    self._descriptor, loop = os.pidfd_open(program.pid), asyncio.get_running_loop()
    self.ended: asyncio.Future[ProcessEnd] = loop.create_future()
    loop.add_reader(self._descriptor, self._begin_end)

  def _begin_end(self) -> None:
    asyncio.get_running_loop().remove_reader(self._descriptor)
    os.close(self._descriptor)
    self._ending = asyncio.ensure_future(self._end())

  async def _end(self) -> None:
    """Clears away what docker's program, which has ended, may have left running."""
    try:
      status = self._program.wait()
      memory = await self._clean_up(status) and status == KILLED
      self.ended.set_result(ProcessEnd(None, "memory") if memory else ProcessEnd(status, ""))
    except Exception as failure:
      self.ended.set_exception(failure)
      self.ended.exception()  # that nobody asks for it is right

  async def end(self) -> ProcessEnd:
    """Kills it with all that it started, see `SandboxProcess.end`; then docker's own program, if that goes on."""
    if not self.ended.done():
      await self._kill_all()
      await asyncio.wait({self.ended}, timeout=CONTROL_TIMEOUT)
      self._program.kill()
    return await asyncio.shield(self.ended)

  async def close(self) -> None:
    """Kills it and closes its pipes; a container that is gone needs nothing more."""
    with contextlib.suppress(InfrastructureFailure):
      await self.end()
    self._program.kill()
    for pipe in (self._program.stdin, self._program.stdout, self._program.stderr):
      with contextlib.suppress(OSError):
        pipe.close()


def _is_argument(word: str) -> bool:
  """Tells if a word can stand on a command line: what an agent writes there, and cannot, is the agent's fault."""
  try:
    return "\0" not in word and len(word.encode("utf-8")) < MAX_ARGUMENT
  except UnicodeEncodeError:  # half of a surrogate pair
    return False


def _environment_options(environment: Mapping[str, str] | None) -> list[str]:
  variables = ENVIRONMENT | dict(environment or {})
  return [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]


def container_command(
  docker: str, name: str, image: str, limits: SandboxLimits, hidden: Sequence[str] = ()
) -> list[str]:
  """Makes the command that starts a container with nothing but what an agent needs."""
  small = f"rw,exec,nosuid,nodev,size={limits.disk},nr_inodes={limits.files},mode=1777"
  folders = ["--read-only", "--tmpfs", f"{WORK}:{small}", "--tmpfs", f"/tmp:{small}", "--shm-size", str(limits.disk)]
  folders += [word for path in hidden for word in ("--tmpfs", f"{path}:ro,size=4096")]
  rights = ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private"]
  sizes = ["--memory", str(limits.memory), "--memory-swap", str(limits.memory)]
  sizes += ["--pids-limit", str(limits.processes + 4)]  # with docker's own two and a pair that kills
  sizes += ["--ulimit", f"fsize={limits.file_bytes}", "--ulimit", f"nofile={limits.open_files}", "--ulimit", "core=0"]
  first = ["--user", "0:0", "--workdir", WORK, "--hostname", "sandbox", "--entrypoint", "sh", image, "-c", FIRST]
  label = ["--name", name, "--label", "sao_jax.sandbox"]
  return [docker, "run", "--rm", "--interactive", "--init", *label, *folders, *rights, *sizes, *first]


async def run_bounded(command: Sequence[str], stdin: bytes, timeout: float, output: int) -> CommandResult:
  """Runs a program of this machine, bounded in time and output; it is killed when it oversteps one of them."""
  budget, begin = OutputBudget(output), time.monotonic()
  (in_read, in_write), (out_read, out_write), (error_read, error_write) = (os.pipe() for _ in range(3))
  try:
    process = subprocess.Popen(command, stdin=in_read, stdout=out_write, stderr=error_write, start_new_session=True)
  except OSError as error:
    for descriptor in (in_write, out_read, error_read):
      os.close(descriptor)
    raise InfrastructureFailure(NAME, f"{command[0]} did not start: {error}") from error
  finally:
    for descriptor in (in_read, out_write, error_write):
      os.close(descriptor)

  # The end of both outputs is the end of the program.
  writing = asyncio.ensure_future(write_all(in_write, stdin))
  reading = asyncio.gather(read_bounded(out_read, budget), read_bounded(error_read, budget))
  exceeded = asyncio.ensure_future(budget.exceeded.wait())
  killed_for = ""
  try:
    await asyncio.wait({reading, exceeded}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if not reading.done():
      killed_for = "output" if budget.exceeded.is_set() else "time"
      process.kill()
    stdout, stderr = await reading
    killed_for = killed_for or ("output" if budget.truncated else "")
    status = await asyncio.to_thread(process.wait)
  finally:
    process.kill()
    for task in (writing, reading, exceeded):
      task.cancel()
    await asyncio.gather(writing, reading, exceeded, return_exceptions=True)
    process.wait()
  timed_out, seconds = killed_for == "time", time.monotonic() - begin
  return CommandResult(None if killed_for else status, stdout, stderr, timed_out, killed_for, budget.truncated, seconds)
