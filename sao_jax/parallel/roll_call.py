"""A roll call at the coordinator's address, before the processes of a run join: who is there, and who cannot come.

jax waits in silence for processes that do not come, and aborts in the end. Here process 0 says when all have come, at
once if one of them has failed (bad input, a missing package), and in the end who has not come. Its port is free for
jax's own service then.

The connections stay: each tells at once when the process at its other end dies. Nothing is encrypted: it is the network
that jax's own service trusts.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

from absl import logging

from sao_jax.errors import ProcessFailed, RunError

TELL_SECONDS = 60.0  # for a process that has failed to wait for those that it tells
EVERY = 10.0  # seconds between two lines that say who has not come

_RETRY = 0.05  # seconds between two attempts to reach process 0
_PATIENCE = 5.0  # seconds for who has connected to say a name, and for a port to become free
_LONGEST = 8192  # bytes of a message
_BYE = b"bye\n"
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # firewalls forget connections that are idle


class Lines:
  """The connections that a roll call leaves: process 0's to all others, and each other's to process 0."""

  def __init__(self, connections: Mapping[int, socket.socket] | None = None):
    """`connections`: by the process at the other end."""
    self._connections = dict(connections or {})
    for connection in self._connections.values():
      connection.setblocking(False)
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
      for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux
          connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

  def lost(self, seconds: float) -> int | None:
    """Waits for so long, and returns a process that has died meanwhile, once; None if there is none."""
    with selectors.DefaultSelector() as selector:
      for index, connection in self._connections.items():
        selector.register(connection, selectors.EVENT_READ, index)
      for key, _ in selector.select(seconds):
        try:
          said = key.fileobj.recv(len(_BYE))
        except TimeoutError:  # the network is silent, which jax's own signs of life judge
          said = _BYE
        except OSError:  # reset
          said = b""
        self._connections.pop(key.data).close()
        if said != _BYE:
          return key.data
    return None

  def close(self) -> None:
    """Takes leave: from here on the end of these connections means nothing."""
    while self._connections:
      _, connection = self._connections.popitem()
      with contextlib.suppress(OSError):
        connection.sendall(_BYE)
      connection.close()


def call_roll(
  address: str, count: int, index: int, seconds: float, *, loopback: bool = False, failure: ProcessFailed | None = None
) -> Lines:
  """Returns once all processes have come.

  Args:
    address: of process 0, with the port.
    count: all processes.
    index: of this one.
    seconds: to wait for the others.
    loopback: process 0 listens at its address alone, and not at all that its host has.
    failure: says that this process cannot come; the others are told, and it is raised.

  Raises:
    ProcessFailed: one of them cannot come; the others are told, too.
    RunError: some have not come in time, or they do not agree on who they are.
  """
  host, _, port = address.rpartition(":")
  place = host.strip("[]"), int(port)
  if index:
    return _answer(place, count, index, seconds, failure)

  # The port is free again before the others are told to go on to it.
  come: dict[int, socket.socket] = {}
  with _listener(place, loopback) as listener:
    _collect(listener, address, come, count, seconds, failure)
  for connection in come.values():
    _send(connection, {"failure": None})
  return Lines(come)


def _collect(
  listener: socket.socket,
  address: str,
  come: dict[int, socket.socket],
  count: int,
  seconds: float,
  failure: ProcessFailed | None,
) -> None:
  """Adds the others to `come` until all are there; raises what keeps them from going on, once they know of it."""
  told: set[int] = set()
  deadline, said_at, end = time.monotonic() + seconds, time.monotonic(), failure
  while True:
    # Those that wait are told at once, and those that come later as they come.
    for index, connection in list(come.items()):
      if end is not None:
        _send(connection, {"failure": _entry(end)})
        told.add(index)
      if end is not None or not _open(connection):  # closed: it was ended while it waited
        come.pop(index).close()

    missing = sorted(set(range(1, count)) - come.keys() - told)
    now = time.monotonic()
    if end is not None and (not missing or now >= deadline):
      raise end
    if not missing:
      return

    # Patience ends; until then who has not come is named now and then.
    if now >= deadline:
      end, deadline = _absent(missing, count, address, seconds), now
      continue
    if now - said_at >= EVERY:
      said_at = now
      logging.warning("Waiting for %s of %d at %s (%.0f s at most).", _named(missing), count, address, deadline - now)

    # One more, whoever it is.
    listener.settimeout(min(1.0, deadline - now))
    with contextlib.suppress(TimeoutError):
      found = _welcome(listener.accept()[0], come, count)
      if end is None and found is not None:
        end, deadline = found, min(deadline, now + TELL_SECONDS)


def _welcome(connection: socket.socket, come: dict[int, socket.socket], count: int) -> ProcessFailed | None:
  """Reads who has come, and adds it to `come`; returns what keeps all from going on. Strangers are left alone."""
  try:
    connection.settimeout(_PATIENCE)
    entry = _read(connection)
    index, its_count, failure = entry["process"], entry["count"], entry["failure"]
    failure = None if failure is None else ProcessFailed(**failure)
    if not (type(index) is type(its_count) is int and 0 < index < its_count):
      raise ValueError("there is no such process")
  except (OSError, ValueError, KeyError, TypeError):
    connection.close()
    return None

  if index in come and _open(come[index]):
    error = ProcessFailed(f"Two processes say that they are number {index} of {count}: each needs a number of its own.")
    _send(connection, {"failure": _entry(error)})
    connection.close()
    return error
  come[index] = connection
  if its_count != count:
    return ProcessFailed(
      f"Process {index} says that they are {its_count}, process 0 that they are {count}: all need one number."
    )
  return failure


def _answer(place: tuple[str, int], count: int, index: int, seconds: float, failure: ProcessFailed | None) -> Lines:
  """The part of all other processes: says who this one is, and waits for what process 0 answers."""
  deadline, said_at = time.monotonic() + seconds, time.monotonic()
  mine = {"process": index, "count": count, "failure": None if failure is None else _entry(failure)}
  while True:
    try:
      answer = _ask(place, mine, deadline)
      break
    except (OSError, ValueError) as error:  # not there yet; or what has its port is another program, or an older one
      reason = error
    now = time.monotonic()
    if now >= deadline:
      raise failure or RunError(
        f"Process {index} of {count} has not found process 0 at {place[0]}:{place[1]} within {seconds:.0f} s "
        f"({reason}). Start that one, or look why it ended; --coordinator names its host, with a port that is open "
        "to the others."
      )
    if now - said_at >= EVERY:
      said_at = now
      logging.warning("Waiting for process 0 at %s:%d (%.0f s at most; %s).", *place, deadline - now, reason)
    time.sleep(_RETRY)

  connection, entry = answer
  if failure is not None or entry["failure"] is not None:
    connection.close()
    raise failure or ProcessFailed(**entry["failure"])
  _until_open(place)
  return Lines({0: connection})


def _ask(place: tuple[str, int], mine: dict[str, Any], deadline: float) -> tuple[socket.socket, dict[str, Any]]:
  """Returns the connection to process 0 and what it answered; OSError or ValueError if there is no such process."""
  connection = socket.create_connection(place, timeout=_PATIENCE)
  try:
    _send(connection, mine)
    # Its own patience may have begun later.
    connection.settimeout(max(deadline - time.monotonic(), 0) + 2 * TELL_SECONDS)
    entry = _read(connection)
    if not isinstance(entry, dict) or "failure" not in entry:
      raise ValueError("what answers there is another program")
    return connection, entry
  except BaseException:
    connection.close()
    raise


def _listener(place: tuple[str, int], loopback: bool) -> socket.socket:
  """Listens at the port, which an earlier run may be about to leave; raises RunError if it stays taken."""
  deadline = time.monotonic() + _PATIENCE
  while True:
    try:
      if loopback:
        return socket.create_server(place, backlog=1024)
      if socket.has_dualstack_ipv6():
        return socket.create_server(("", place[1]), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
      return socket.create_server(("", place[1]), backlog=1024)
    except OSError as error:
      if time.monotonic() >= deadline:
        raise RunError(
          f"Process 0 cannot listen at port {place[1]} of {place[0]} ({error}). Name another one in --coordinator, the "
          "same for all processes."
        ) from error
    time.sleep(_RETRY)


def _until_open(place: tuple[str, int]) -> None:
  """Waits until jax's service listens at the port: what it does not reach at once, it tries again a second later."""
  deadline = time.monotonic() + _PATIENCE
  while time.monotonic() < deadline:
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=_PATIENCE):
      return
    time.sleep(_RETRY)


def _absent(missing: list[int], count: int, address: str, seconds: float) -> ProcessFailed:
  return ProcessFailed(
    f"Process 0 has waited for {seconds:.0f} s at {address}, and {_named(missing)} of {count} did not come. Start all, "
    "each with its own number and this address, or look in their logs why they ended; --join_timeout waits longer."
  )


def _named(processes: list[int]) -> str:
  """Names processes in a few words."""
  few = ", ".join(map(str, processes[:8])) + (f" and {len(processes) - 8} more" if len(processes) > 8 else "")
  return f"process {few}" if len(processes) == 1 else f"processes {few}"


def _entry(error: ProcessFailed) -> dict[str, Any]:
  return {"message": str(error)[: _LONGEST // 2], "process": error.process, "status": error.status}


def _open(connection: socket.socket) -> bool:
  """Tells if the process at the other end has not closed a connection, on which it has nothing to say meanwhile."""
  with selectors.DefaultSelector() as selector:
    selector.register(connection, selectors.EVENT_READ)
    return not selector.select(0)


def _send(connection: socket.socket, entry: dict[str, Any]) -> None:
  with contextlib.suppress(OSError):  # it has gone
    connection.sendall(json.dumps(entry).encode() + b"\n")


def _read(connection: socket.socket) -> Any:
  """Reads one line of JSON, and nothing behind it."""
  line = bytearray()
  while not line.endswith(b"\n"):
    byte = connection.recv(1)
    if not byte or len(line) > _LONGEST:
      raise ValueError("the connection ended" if not byte else "what answers there is another program")
    line += byte
  return json.loads(line)
