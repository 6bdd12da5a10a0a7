"""An HTTP server in a thread and an event loop of its own, in front of backends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sao_jax.gateway.admission_gate import Gate
from sao_jax.gateway.app import DEFAULT_LIMITS, Limits, make_app
from sao_jax.gateway.exchange import Backends, Endpoint, RequestRefused
from sao_jax.gateway.listening import listen

KEEP_ALIVE = 75  # seconds for which an idle connection stays open: agents think between two requests
LEFT_OVER = 2  # seconds for connections to close, once the requests on them have ended


class GatewayServer:
  """Serves between `start` and `stop`; also a context manager.

  Example:
    with GatewayServer(OneKey(backend, key="sk-1")) as server:
      client = openai.OpenAI(base_url=server.url, api_key="sk-1")
  """

  def __init__(
    self,
    backends: Backends,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    listener: socket.socket | None = None,
    endpoints: Sequence[Endpoint] = (),
    health: Callable[[], Mapping[str, Any]] = dict,
    limits: Limits = DEFAULT_LIMITS,
    further_requests: Callable[[], int] = lambda: 0,
    grace: float = 5.0,
  ):
    """Takes the address, so that clients may connect from now on; they are answered after `start`.

    Args:
      backends: knows the keys.
      host: an address of this machine. Other machines reach any but a loopback address, without encryption.
      port: 0 for a free one.
      listener: a socket of `listen`, in place of `host` and `port`.
      endpoints: further routes.
      health: facts for `/health`; called in the server's event loop.
      limits: bounds of a request.
      further_requests: how many are admitted at a time beyond those of `limits`, as for sessions that are open.
      grace: seconds that requests in flight get to end when the server stops.

    Raises:
      ConfigError: a package is missing, the address is not free, or others could come in without a key.
    """
    # Bad input, before anything is taken.
    listener = listener or listen(host, port, keyed=_wants_key(backends))
    import uvicorn

    # The application, and a server that leaves signals and logs to the program around it.
    self._gate, self._grace = Gate(lambda: limits.requests + further_requests()), grace
    app = make_app(backends, self._gate, limits, endpoints=endpoints, health=health)
    settings = uvicorn.Config(
      app,
      lifespan="off",
      ws="none",
      log_config=None,
      log_level="warning",
      access_log=False,
      server_header=False,
      proxy_headers=False,
      timeout_keep_alive=KEEP_ALIVE,
      timeout_graceful_shutdown=LEFT_OVER,
    )
    self._server = uvicorn.Server(settings)

    # The socket listens already, so that nobody has to wait for the thread.
    self._socket = listener
    self._host, self._port = listener.getsockname()[:2]
    self._loop: asyncio.AbstractEventLoop | None = None
    self._stopping = asyncio.Event()
    self._ready = threading.Event()
    self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="gateway", daemon=True)

  @property
  def root(self) -> str:
    """The address without a path, as http://127.0.0.1:8000."""
    wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
    return f"http://{f'[{wildcard}]' if ':' in wildcard else wildcard}:{self._port}"

  @property
  def url(self) -> str:
    """The base URL for clients of OpenAI's API."""
    return f"{self.root}/v1"

  @property
  def loop(self) -> asyncio.AbstractEventLoop:
    """The event loop in which backends are called; there is one after `start`."""
    if self._loop is None:
      raise RuntimeError("the server was not started")
    return self._loop

  def start(self) -> GatewayServer:
    """Starts the thread and returns the server itself."""
    self._thread.start()
    self._ready.wait()
    return self

  def stop(self) -> None:
    """Refuses new requests, gives those in flight their time, and ends the thread; a second call does nothing."""
    if self._loop is None:
      self._socket.close()
      return
    if self._thread.is_alive():
      with contextlib.suppress(RuntimeError):  # the loop has ended in this moment
        self._loop.call_soon_threadsafe(self._stopping.set)
      self._thread.join()

  def __enter__(self) -> GatewayServer:
    return self.start()

  def __exit__(self, *exception: object) -> None:
    self.stop()

  async def _main(self) -> None:
    self._loop = asyncio.get_running_loop()
    self._ready.set()
    serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
    stopping = asyncio.ensure_future(self._stopping.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)

    # Requests end first, then their connections.
    stopping.cancel()
    await self._gate.close(self._grace)
    self._server.should_exit = True
    await serving


def _wants_key(backends: Backends) -> bool:
  try:
    backends.find("")
  except RequestRefused:
    return True
  return False
