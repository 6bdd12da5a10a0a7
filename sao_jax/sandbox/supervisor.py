"""The first process of a local sandbox, as a script: starts commands, watches them, and leaves none behind.

It is process 1 of its namespace: no signal from inside reaches it, and with its end the kernel ends all others. Its
parent, outside, sends requests over a socket, with the descriptors that a command reads and writes. The parent's death
closes that socket. What it says here is not trusted more than needed: the parent measures time and output itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
from typing import Any

RUN, KILL = b"r", b"k"
TICK = 0.02  # seconds between two looks at memory and files
NICENESS = 5  # the event loop and the sampler outside go first
WORK = "/workspace"
WRITABLE = (WORK, "/tmp", "/dev/shm")
REFUSED = 125  # exit status for a file that is refused; the reason stands in standard error
NOT_STARTED = 126  # exit status of a command that cannot be started, as in a shell
PR_SET_DUMPABLE = 4


def main() -> None:
  """Serves the parent until it has gone; the limits are the first argument, as JSON."""
  ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process inside may look into this one
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets from inside only what it has a handler for
  os.nice(NICENESS)
  limits = json.loads(sys.argv[1])
  control = socket.socket(fileno=0)
  control.send(b"{}")
  while True:
    message, descriptors, _, _ = socket.recv_fds(control, 1, 4)
    if not message:
      os._exit(0)
    if message == RUN:
      control.send(json.dumps(serve(control, descriptors, limits)).encode("ascii"))


def serve(control: socket.socket, descriptors: list[int], limits: dict[str, int]) -> dict[str, Any]:
  """Starts what one request asks for, waits for its end and for the end of all that it started."""
  asked, *streams = descriptors
  with open(asked, "rb") as file:
    request = json.load(file)
  child = os.fork()
  if child == 0:
    _attempt(request, streams, limits)
  for stream in streams:
    os.close(stream)
  status, cause = watch(control, child, limits)

  # Whatever still runs now was left in the background. All orphans are children of this process.
  with contextlib.suppress(ChildProcessError):
    while True:
      with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
      pid, ended = os.waitpid(-1, 0)
      status = ended if pid == child else status
  return {"exit_status": None if status is None else os.waitstatus_to_exitcode(status), "killed_for": cause}


def watch(control: socket.socket, child: int, limits: dict[str, int]) -> tuple[int | None, str]:
  """Waits until a child ends, oversteps a limit or is to be killed: (its wait status, the limit)."""
  # A folder that was too full before may be emptied, but not filled more.
  most_files = {folder: max(limits["files"], files_in(folder)) for folder in WRITABLE}
  descriptor = os.pidfd_open(child)
  poll = select.poll()
  poll.register(descriptor, select.POLLIN)
  poll.register(control, select.POLLIN)
  try:
    while True:
      if any(ready == control.fileno() for ready, _ in poll.poll(1000 * TICK)):
        if not control.recv(1):
          os._exit(0)  # the parent has gone, and with this process all others go
        return None, "asked"
      pid, status = -1, 0
      while pid:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
          return status, ""
      if memory_in_use(limits["memory"]) > limits["memory"]:
        return None, "memory"
      if any(files_in(folder) > most for folder, most in most_files.items()):
        return None, "disk"
  finally:
    os.close(descriptor)


def memory_in_use(enough: int) -> int:
  """Adds up the memory of all processes but this one, in bytes; shared pages count once if it is more than `enough`."""
  pids = [name for name in os.listdir("/proc") if name.isdecimal() and name != "1"]
  resident = {pid: _kilobytes(f"/proc/{pid}/status", b"RssAnon:", b"RssShmem:", b"VmSwap:") for pid in pids}
  if 1024 * sum(resident.values()) <= enough:
    return 1024 * sum(resident.values())
  # The slower and exact way. A process that hides its pages counts with all of them.
  shared = {
    pid: _kilobytes(f"/proc/{pid}/smaps_rollup", b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:", hidden=-1) for pid in pids
  }
  return 1024 * sum(resident[pid] if shared[pid] < 0 else shared[pid] for pid in pids)


def files_in(folder: str) -> int:
  """Counts the files and folders of a file system."""
  state = os.statvfs(folder)
  return state.f_files - state.f_ffree


def _kilobytes(path: str, *fields: bytes, hidden: int = 0) -> int:
  try:
    # As bytes: text would end a line at a carriage return, which a process may have in its name.
    with open(path, "rb") as file:
      return sum(int(line.split()[1]) for line in file if line.startswith(fields))
  except OSError:  # it has ended, or cannot be looked into
    return hidden


def _attempt(request: dict[str, Any], streams: list[int], limits: dict[str, int]) -> None:
  """Does what is asked for, in the child; never returns."""
  status = NOT_STARTED
  try:
    for target, stream in enumerate(streams):
      os.dup2(stream, target)
    os.closerange(3, 1024)
    os.setsid()
    _perform(request, limits)
    status = 0
  except (OSError, ValueError) as error:
    problem = getattr(error, "strerror", None) or error
    os.write(2, f"{request['what']}: {problem}\n".encode("utf-8", "replace"))
    status = NOT_STARTED if request["kind"] == "run" else REFUSED
  finally:
    os._exit(status)


def _perform(request: dict[str, Any], limits: dict[str, int]) -> None:
  os.chdir(WORK)
  if request["kind"] == "read":
    _read(request["path"], request["max_bytes"])
    return
  _limit(limits)
  if request["kind"] == "write":
    _write(request["path"])
    return
  os.chdir(request["cwd"])
  for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, other programs should not
    signal.signal(ignored, signal.SIG_DFL)
  os.execvpe(request["command"][0], request["command"], request["environment"])


def _limit(limits: dict[str, int]) -> None:
  values = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_DATA: limits["memory"],
    resource.RLIMIT_FSIZE: limits["file_bytes"],
    resource.RLIMIT_NOFILE: limits["open_files"],
    resource.RLIMIT_NPROC: limits["processes"] + 1,  # with this process; the kernel counts in the user namespace
  }
  for kind, value in values.items():
    _, largest = resource.getrlimit(kind)
    value = value if largest == resource.RLIM_INFINITY else min(value, largest)
    resource.setrlimit(kind, (value, value))


def _read(path: str, max_bytes: int) -> None:
  descriptor = _open(path, os.O_RDONLY, make=False)
  size = os.fstat(descriptor).st_size
  if size > max_bytes:
    raise ValueError(f"it has {size} bytes, more than {max_bytes}")
  while piece := os.read(descriptor, 65536):
    _put(1, piece)


def _write(path: str) -> None:
  descriptor = _open(path, os.O_WRONLY | os.O_CREAT, make=True)
  os.ftruncate(descriptor, 0)
  while piece := os.read(0, 65536):
    _put(descriptor, piece)


def _put(descriptor: int, data: bytes) -> None:
  while data:
    data = data[os.write(descriptor, data) :]


def _open(path: str, flags: int, *, make: bool) -> int:
  """Opens a plain file below the work folder, step by step, through no symlink, and without waiting for a fifo."""
  *folders, name = [part for part in path.split("/") if part not in ("", ".")] or ["."]
  here = os.open(WORK, os.O_RDONLY | os.O_DIRECTORY)
  for folder in folders:
    if make:
      with contextlib.suppress(FileExistsError):
        os.mkdir(folder, dir_fd=here)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
  descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=here)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    raise ValueError("it is no plain file")
  return descriptor


if __name__ == "__main__":
  main()
