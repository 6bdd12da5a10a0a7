"""A server of an OpenEnv environment on this machine, for one process: it starts when it is needed, and dies with it.

As a program it serves the application until its standard input ends, which a parent's death ends too:

    python -m sao_jax.environments.openenv_server module:app DESCRIPTOR
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from typing import IO, Any

from sao_jax.errors import ConfigError

TAIL = 600  # characters of a server's last words in an error
SCHEMA_TIMEOUT = 10.0  # seconds for a server to tell its schema
POLL = 0.05  # seconds between two looks whether it answers


class OpenEnvServer:
  """A server, our own or somebody else's; thread-safe."""

  def __init__(self, base_url: str, app: str, start_timeout: float):
    """Remembers which one.

    Args:
      base_url: of a server that runs already, "" for our own.
      app: "module:application", which our own serves.
      start_timeout: seconds that our own may take to start.
    """
    self._base_url, self._app, self._start_timeout = base_url.rstrip("/"), app, start_timeout
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None
    self._output: IO[bytes] | None = None

  def url(self) -> str:
    """Returns the server's address; our own is started first, or anew if it has died.

    Raises:
      OSError: it does not start.
    """
    if not self._app:
      return self._base_url
    with self._lock:
      if self._process is None or self._process.poll() is not None:
        self._start()
      return self._base_url

  def schema(self) -> dict[str, Any]:
    """Asks for the JSON schemas of actions and observations; {} from a server that tells none.

    Raises:
      OSError: nobody answers.
    """
    try:
      answer = _get(f"{self.url()}/schema")
    except urllib.error.HTTPError:
      return {}
    return answer if isinstance(answer, dict) else {}

  def close(self) -> None:
    """Ends our own server."""
    with self._lock:
      process, self._process = self._process, None
      if process is not None:
        process.stdin.close()
        process.kill()
        process.wait()
        self._output.close()

  def _start(self) -> None:
    # The socket is bound here, so that the port is nobody else's; connections wait until the server takes them.
    with socket.create_server(("127.0.0.1", 0)) as listener:
      self._base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
      self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the server
      command = [sys.executable, "-m", __name__, self._app, str(listener.fileno())]
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=self._output,
        stderr=subprocess.STDOUT,
        pass_fds=(listener.fileno(),),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
      )

    # It is there when it answers.
    deadline = time.monotonic() + self._start_timeout
    while (left := deadline - time.monotonic()) > 0:
      if self._process.poll() is not None:
        raise ConnectionError(
          f"the server of {self._app!r} ended with status {self._process.returncode}: {self._said()}"
        )
      try:
        _get(f"{self._base_url}/health", min(left, SCHEMA_TIMEOUT))
        return
      except urllib.error.HTTPError:
        return  # it answers
      except (OSError, http.client.HTTPException):
        time.sleep(POLL)
    self._process.kill()
    self._process.wait()
    raise TimeoutError(f"the server of {self._app!r} did not answer within {self._start_timeout:g} s: {self._said()}")

  def _said(self) -> str:
    self._output.seek(0)
    return self._output.read().decode("utf-8", "replace").strip()[-TAIL:] or "it said nothing"


def check_package() -> None:
  """Refuses to go on without the package, by ConfigError."""
  try:
    import openenv.core.generic_client  # noqa: F401 - the import is the check
  except ImportError as error:
    problem = f"The package openenv-core is not installed ({error})."
    raise ConfigError("environment", problem, "Run: pip install -e '.[openenv]'") from error


def _get(url: str, seconds: float = SCHEMA_TIMEOUT) -> Any:
  """Reads JSON; no proxy stands between."""
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  with opener.open(url, timeout=seconds) as answer:
    return json.loads(answer.read() or b"null")


def main() -> None:
  """Serves an application; ends when the standard input does."""
  threading.Thread(target=_end_with_input, daemon=True).start()

  import uvicorn

  application, descriptor = sys.argv[1], int(sys.argv[2])
  listener = socket.socket(fileno=descriptor)
  server = uvicorn.Server(uvicorn.Config(application, log_level="warning", ws_ping_interval=None))
  server.run(sockets=[listener])


def _end_with_input() -> None:
  while os.read(0, 4096):  # not by sys.stdin: its lock, held here, aborts an interpreter that ends by an error
    pass
  os._exit(0)


if __name__ == "__main__":
  main()
