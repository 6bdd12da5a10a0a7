"""Scripts that need jax and sao_jax, started as copies of a process that has imported them, two seconds sooner.

    process = start("tests/toys/killed_run.py", "a", environment=..., cwd=..., log=file)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL

No thread runs in the process that is copied, and jax has not looked for devices there. A script gets its environment
variables when it starts; those that jax reads when it is imported are the server's, one server for each set of them.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO

IMPORTED = "jax", "orbax.checkpoint", "sao_jax.training.loop", "sao_jax.training.sft"
_LATE = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"  # read when processes join


class Started:
  """A started script, used like `subprocess.Popen`.

  Attributes:
    pid: its number.
    returncode: its exit status, negative if a signal has ended it; None while it runs.
  """

  def __init__(self, connection: socket.socket):
    """`connection`: to the server, which sends the number first and the exit status in the end."""
    self._lines = connection.makefile("r")
    self._connection = connection
    self.pid, self.returncode = int(self._lines.readline()), None
    self._ended = threading.Event()
    threading.Thread(target=self._await_end, daemon=True).start()

  def _await_end(self) -> None:
    self.returncode = int(self._lines.readline() or -signal.SIGKILL)
    self._lines.close()
    self._connection.close()
    self._ended.set()

  def poll(self) -> int | None:
    """The exit status; None while it runs."""
    return self.returncode

  def wait(self, timeout: float | None = None) -> int:
    """Waits for the end; raises subprocess.TimeoutExpired."""
    if not self._ended.wait(timeout):
      raise subprocess.TimeoutExpired(str(self.pid), timeout)
    return self.returncode

  def send_signal(self, number: int) -> None:
    """Sends a signal, unless it has ended."""
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    """Ends it at once."""
    self.send_signal(signal.SIGKILL)


def start(
  script: object, *arguments: object, environment: Mapping[str, str], cwd: object, log: IO | None = None
) -> Started:
  """Starts a script with these environment variables and arguments; `log` gets all that it prints."""
  early = {name: value for name, value in environment.items() if name.startswith(("JAX_", "PYTHON", "XLA_"))}
  for name in _LATE:
    early.pop(name, None)
  server = _server(tuple(sorted(early.items())))
  connection = socket.socket(socket.AF_UNIX)
  connection.connect(server)
  request = {"argv": [str(script), *map(str, arguments)], "environment": dict(environment), "cwd": str(cwd)}
  socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [log.fileno()])
  return Started(connection)


@functools.cache
def _server(early: Sequence[tuple[str, str]]) -> str:
  """Starts a server, which ends with this process; returns its address."""
  folder = tempfile.mkdtemp()
  known = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PYTHON", "XLA_"))}
  command = [sys.executable, __file__, f"{folder}/socket"]
  server = subprocess.Popen(command, env=known | dict(early), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
  assert server.stdout.readline() == b"ready\n"
  atexit.register(shutil.rmtree, folder)
  atexit.register(server.communicate)  # it ends when its input does, as it does if a signal ends this process
  return f"{folder}/socket"


def serve(address: str) -> None:
  """Imports what scripts need, and starts a copy of this process for each that is asked for."""
  for name in IMPORTED:
    importlib.import_module(name)
  listener = socket.socket(socket.AF_UNIX)
  listener.bind(address)
  listener.listen(64)
  wakes, wake = socket.socketpair()
  wake.setblocking(False)
  signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
  signal.signal(signal.SIGCHLD, lambda number, frame: None)
  sys.stdout.write("ready\n")
  sys.stdout.flush()

  children: dict[int, socket.socket] = {}
  with selectors.DefaultSelector() as selector:
    for source in (listener, wakes, sys.stdin):
      selector.register(source, selectors.EVENT_READ)
    while True:
      ready = [key.fileobj for key, _ in selector.select()]
      if sys.stdin in ready:  # whoever asks has ended
        for pid in children:
          os.kill(pid, signal.SIGKILL)
        return
      if listener in ready:
        connection = listener.accept()[0]
        text, files, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        while not text.endswith(b"\n"):
          text += connection.recv(1 << 20)
        pid = os.fork()
        if not pid:
          for each in (listener, wakes, wake, connection, *children.values()):
            each.detach()
          _become(json.loads(text), files[0])
        os.close(files[0])
        children[pid] = connection
        connection.sendall(f"{pid}\n".encode())
      if wakes in ready:
        wakes.recv(4096)
        for pid in list(children):
          ended, status = os.waitpid(pid, os.WNOHANG)
          if ended:
            connection = children.pop(pid)
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


def _become(request: dict, log: int) -> None:
  """Runs a script as a program of its own would."""
  signal.set_wakeup_fd(-1)
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  os.closerange(3, log)
  os.closerange(log + 1, 1024)
  os.dup2(log, 1)
  os.dup2(log, 2)
  os.environ.clear()
  os.environ.update(request["environment"])
  os.chdir(request["cwd"])
  sys.argv = request["argv"]
  sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
  status = 0
  try:
    runpy.run_path(sys.argv[0], run_name="__main__")
  except SystemExit as error:
    status = error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error.code, str):
      sys.stderr.write(error.code + "\n")
  except BaseException:
    sys.excepthook(*sys.exc_info())
    status = 1
  finally:
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    os._exit(status)


if __name__ == "__main__":
  serve(sys.argv[1])
