"""The parent of a harness's command, as a script: passes its exit status on, and lets nothing outlive it.

    python harness_keeper.py DESCRIPTOR COMMAND ...

The descriptor is the reading end of a pipe whose other end only the training process holds. Once that is closed, by the
end of the episode or by any death of that process, everything below this one is killed, daemons too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_STARTED = 126  # exit status of a command that cannot be started, as in a shell
BY_SIGNAL = 128  # added to the number of the signal that ended the command


def main() -> None:
  """Runs the command until it ends, or nobody holds the pipe any more; exits with its status."""
  leash, command = int(sys.argv[1]), sys.argv[2:]
  prctl = ctypes.CDLL(None).prctl
  prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans below become children of this process
  child = os.fork()
  if child == 0:
    _become(command, leash, prctl)
  for stream in range(3):
    os.close(stream)  # the command's own: their ends are its end

  # Until it has ended, or is to end.
  ended = os.pidfd_open(child)
  poll = select.poll()
  poll.register(ended, select.POLLIN)
  poll.register(leash, select.POLLIN | select.POLLHUP)
  ready = [descriptor for descriptor, _ in poll.poll()]
  if ended not in ready:
    os.kill(child, signal.SIGKILL)
  _, status = os.waitpid(child, 0)
  kill_all_below()
  code = os.waitstatus_to_exitcode(status)
  os._exit(BY_SIGNAL - code if code < 0 else code)


def status_of(code: int) -> int:
  """Returns the command's exit status from this script's: the negative number of a signal that ended it."""
  return BY_SIGNAL - code if code > BY_SIGNAL else code


def kill_all_below() -> None:
  """Kills all descendants, whatever session they have moved to, until there are none."""
  with contextlib.suppress(ChildProcessError):
    while True:
      for pid in _children(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      os.waitpid(-1, 0)  # its children are children of this process now


def _children(pid: int) -> list[int]:
  with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
    return [int(child) for child in file.read().split()]


def _become(command: list[str], leash: int, prctl: ctypes._CFuncPtr) -> None:
  """Becomes the command, in the child; never returns."""
  try:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should this script itself be killed
    os.close(leash)
    os.setsid()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, other programs should not
      signal.signal(ignored, signal.SIG_DFL)
    os.execvp(command[0], command)
  except OSError as error:
    os.write(2, f"{command[0]}: {error.strerror}\n".encode())
  finally:
    os._exit(NOT_STARTED)


if __name__ == "__main__":
  main()
