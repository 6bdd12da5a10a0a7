"""Messages of the process that leads a group to those that follow it, by TCP, several times per second.

The processes find each other through the key-value store of all, which is too slow for the messages themselves: it
takes a detour by process 0. A jitted broadcast would take its turn on the devices, behind the work that it is to order,
and has a size of its own. One kilobyte there and an answer back, between two processes of a busy machine: 6.8 ms by the
store, 9.2 ms by `broadcast_one_to_all`, .02 ms by a socket.

A socket tells at once when the process at its other end dies. Signs of life tell of one that is silent, and of one that
lives and does not do what it was told. Nothing is encrypted: it is the network that jax's own service trusts. A number
that only the group knows keeps away who connects by mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import logging

from sao_jax.parallel.agreement import SECONDS, SLICE, Processes, ProcessFailed

EXPLAIN_SECONDS = 2.0  # to wait for the reason, after a program has failed that another process is needed for
LEAVE_SECONDS = 10.0  # to wait for the others at the end

_SIGN, _MESSAGE, _FAILURE, _END = b"s", b"m", b"f", b"e"
_HEAD = struct.Struct("!cI")  # kind and length of what follows
_NUMBER = struct.Struct("!Q")
_SECRET = 16  # bytes


@dataclasses.dataclass(frozen=True)
class Patience:
  """Seconds.

  Attributes:
    sign: between two signs of life.
    silent: without any, after which a process is given up.
    stuck: without anything done, after which one that lives and has something to do is given up.
  """

  sign: float = 5.0
  silent: float = 60.0
  stuck: float = SECONDS


PATIENCE = Patience()


class _Peer:
  """The process at the other end of a socket, and what is known of it."""

  def __init__(self, index: int, connection: socket.socket):
    self.index, self.connection, self.buffer = index, connection, b""
    self.heard = self.moved = time.monotonic()
    self.done = 0  # messages


class Channel:
  """The sockets of one process of a group: those of the leader to all followers, or that of a follower to the leader.

  A thread reads them. Messages are sent and received by one thread each.

  Attributes:
    error: why the channel has ended; None as long as it works, and after a regular end.
  """

  def __init__(self, index: int, leader: int, connections: Mapping[int, socket.socket], patience: Patience = PATIENCE):
    """Args:
    index: this process.
    leader: that of the group's leader.
    connections: a socket for each process at the other end.
    patience: with the others.
    """
    self.error: ProcessFailed | None = None
    self._index, self._leader, self._patience = index, leader, patience
    self._peers = {peer: _Peer(peer, connection) for peer, connection in connections.items()}
    self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    self._sent, self._received = 0, -1  # whoever receives the next message has done those before
    self._ended = self._closing = False
    self._on_failure: Callable[[ProcessFailed], None] = lambda error: None
    self._failed, self._write, self._state = threading.Event(), threading.Lock(), threading.Lock()

    for peer in self._peers.values():
      peer.connection.settimeout(patience.silent)
      peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._thread = threading.Thread(target=self._read, name="group channel", daemon=True)
    self._thread.start()

  @property
  def leads(self) -> bool:
    """Is this the process that sends?"""
    return self._index == self._leader

  def send(self, message: bytes) -> None:
    """Sends a message to all followers.

    Raises:
      ProcessFailed: one of them has failed.
    """
    if self.error is not None:
      raise self.error
    self._sent += 1
    self._write_all(_MESSAGE, message)
    if self.error is not None:
      raise self.error

  def receive(self) -> bytes | None:
    """Waits for the next message of the leader; None at the end.

    Raises:
      ProcessFailed: the leader has failed.
    """
    self._received += 1
    message = self._messages.get()
    if message is None and self.error is not None:
      raise self.error
    return message

  def on_failure(self, call: Callable[[ProcessFailed], None]) -> None:
    """Has `call` called once with the error if the channel ends by one, in any thread; at once if it has."""
    with self._state:
      self._on_failure, error = call, self.error
    if error is not None:
      call(error)

  def explain(self, error: BaseException) -> BaseException:
    """The reason of an error if it is another process, of which the channel may learn a moment later."""
    known = not isinstance(error, ProcessFailed) and self._failed.wait(EXPLAIN_SECONDS)
    return self.error if known else error

  @contextlib.contextmanager
  def explained(self) -> Iterator[None]:
    """Raises the reason in place of an error: a program fails when another process dies in the middle of it."""
    try:
      yield
    except Exception as error:  # of different types, by the place where jax meets it
      reason = self.explain(error)
      if reason is error:
        raise
      raise reason from error

  def fail(self, error: BaseException) -> None:
    """Tells the others that this process cannot go on, and why, and leaves."""
    with contextlib.suppress(OSError):
      self._write_all(_FAILURE, f"{type(error).__name__}: {error}"[:2000].encode())
    self.close()

  def close(self) -> None:
    """Leaves; of the leader, the end for all. Waits for the others to leave, for a few seconds."""
    with self._state:
      if self._closing:
        return
      self._closing = True
    if self.leads and self.error is None:
      self._write_all(_END, b"")

    # A socket that is closed before everything was read would take back what the other side has not read yet.
    self._shut(socket.SHUT_WR)
    if threading.current_thread() is not self._thread:
      self._thread.join(LEAVE_SECONDS)
    for peer in self._peers.values():
      peer.connection.close()

  def _shut(self, direction: int) -> None:
    for peer in self._peers.values():
      with contextlib.suppress(OSError):
        peer.connection.shutdown(direction)

  def _write_all(self, kind: bytes, content: bytes) -> None:
    """Writes to all; one that does not take it is the channel's error."""
    frame = _HEAD.pack(kind, len(content)) + content
    for peer in self._peers.values():
      try:
        with self._write:
          peer.connection.sendall(frame)
      except OSError as error:
        self._lose(peer, f"cannot be reached ({error})")

  def _lose(self, peer: _Peer, why: str) -> None:
    """Ends the channel because of another process, unless it is at its end anyway."""
    role = "which leads this sampler" if peer.index == self._leader else "which follows in this sampler"
    error = ProcessFailed(f"Process {peer.index}, {role}, {why}. Its own log may say more.", peer.index)
    with self._state:
      if self.error is not None or self._ended or self._closing:
        return
      self.error, call = error, self._on_failure
    logging.error("%s", error)  # the main thread may wait for a device for ever, until jax ends the process
    self._failed.set()
    self._messages.put(None)
    call(error)

  # The thread that reads.

  def _read(self) -> None:
    self._read_until_the_end()
    if self.error is not None:
      # The others wait for this process in vain: they learn the reason, and then that nothing comes any more.
      self._write_all(_FAILURE, str(self.error).encode())
      self._shut(socket.SHUT_RDWR)

  def _read_until_the_end(self) -> None:
    with selectors.DefaultSelector() as selector:
      for peer in self._peers.values():
        selector.register(peer.connection, selectors.EVENT_READ, peer)
      signed = time.monotonic()

      # Until everybody has left, or somebody is lost.
      while selector.get_map() and self.error is None:
        for key, _ in selector.select(self._patience.sign):
          if not self._read_from(key.data):
            selector.unregister(key.fileobj)
        if time.monotonic() - signed >= self._patience.sign and not self._closing:
          signed = time.monotonic()
          self._write_all(_SIGN, _NUMBER.pack(max(self._received, 0)))
          self._check_peers()

  def _read_from(self, peer: _Peer) -> bool:
    """Takes what has come from one process; False once nothing more will."""
    try:
      data = peer.connection.recv(2**16)
    except OSError as error:
      self._lose(peer, f"cannot be reached any more ({error})")
      return False
    if not data:
      self._lose(peer, "has ended")
      return False

    # Whole frames; the rest waits for its end.
    peer.heard, peer.buffer = time.monotonic(), peer.buffer + data
    while len(peer.buffer) >= _HEAD.size:
      kind, length = _HEAD.unpack_from(peer.buffer)
      end = _HEAD.size + length
      if len(peer.buffer) < end:
        break
      self._take(peer, kind, peer.buffer[_HEAD.size : end])
      peer.buffer = peer.buffer[end:]
    return True

  def _take(self, peer: _Peer, kind: bytes, content: bytes) -> None:
    if kind == _MESSAGE:
      self._messages.put(content)
    elif kind == _END:
      self._ended = True
      self._messages.put(None)
    elif kind == _FAILURE:
      self._lose(peer, f"has failed ({content.decode()})")
    else:
      (done,) = _NUMBER.unpack(content)
      if done != peer.done:
        peer.done, peer.moved = done, time.monotonic()

  def _check_peers(self) -> None:
    """Gives up who is silent, or lives and does nothing of what it was told."""
    now = time.monotonic()
    for peer in self._peers.values():
      if not self.leads or peer.done >= self._sent:
        peer.moved = now
      if now - peer.heard > self._patience.silent:
        self._lose(peer, f"has shown no sign of life for {self._patience.silent:.0f} s")
      elif now - peer.moved > self._patience.stuck:
        undone = self._sent - peer.done
        self._lose(peer, f"lives, and has done none of its next {undone} calls for {self._patience.stuck:.0f} s")


def open_channel(processes: Processes, members: Sequence[int], patience: Patience = PATIENCE) -> Channel:
  """Connects the processes of a group, of which the first one leads; all of them call it, one group after the other.

  Raises:
    ProcessFailed: one of the others has failed, or does not come.
  """
  leader, *followers = members
  name = f"group/{leader}"
  if processes.index != leader:
    host, port, secret = processes.collect(name, leader)
    connection = socket.create_connection((host, port), timeout=patience.silent)
    connection.sendall(bytes.fromhex(secret) + _NUMBER.pack(processes.index))
    return Channel(processes.index, leader, {leader: connection}, patience)

  # The leader listens at an address of its own, as long as somebody is missing.
  secret, peers = secrets.token_bytes(_SECRET), {}
  family = socket.AF_INET6 if ":" in processes.host else socket.AF_INET
  with socket.create_server((processes.host, 0), family=family) as server:
    server.settimeout(SLICE)
    processes.post(name, [processes.host, server.getsockname()[1], secret.hex()])
    given_up = time.monotonic() + patience.stuck
    while missing := [follower for follower in followers if follower not in peers]:
      with contextlib.suppress(TimeoutError):
        connection, _ = server.accept()
        index = _greeting(connection, secret)
        if index in missing:
          peers[index] = connection
        else:
          connection.close()
      processes.look()
      if time.monotonic() > given_up:
        late = f"Process {missing[0]}, which follows in this sampler, has not come for {patience.stuck:.0f} s."
        raise ProcessFailed(late, missing[0])

  # Before anybody can ask for the next channel.
  processes.remove(name)
  return Channel(processes.index, leader, peers, patience)


def _greeting(connection: socket.socket, secret: bytes) -> int | None:
  """The process that has connected; None for whoever does not belong to the group."""
  connection.settimeout(SLICE)
  greeting = b""
  with contextlib.suppress(OSError):
    while len(greeting) < _SECRET + _NUMBER.size:
      data = connection.recv(_SECRET + _NUMBER.size - len(greeting))
      if not data:
        return None
      greeting += data
  if len(greeting) < _SECRET + _NUMBER.size or not secrets.compare_digest(greeting[:_SECRET], secret):
    return None
  return _NUMBER.unpack(greeting[_SECRET:])[0]
