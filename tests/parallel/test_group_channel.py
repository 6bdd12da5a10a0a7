"""Messages between the leader of a group and its followers, which are threads here."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from toys.shared_store import SharedStore, together

from sao_jax.parallel.agreement import Processes, ProcessFailed
from sao_jax.parallel.group_channel import Channel, Patience, open_channel

QUICK = Patience(sign=0.02, silent=0.5, stuck=0.5)


def test_followers_get_all_messages_in_order_and_the_end():
  messages = [b"", b"first", bytes(300_000), b"last"]

  def lead(processes):
    channel = open_channel(processes, (0, 1, 2))
    assert channel.leads
    for message in messages:
      channel.send(message)
    channel.close()
    return channel.error

  def follow(processes):
    channel = open_channel(processes, (0, 1, 2))
    received = list(iter(channel.receive, None))
    channel.close()
    assert channel.error is None and not channel.leads
    return received

  store = SharedStore()
  for _ in range(2):  # the second time at another address
    assert together(store, 3, lead, follow) == [None, messages, messages]
  assert not [key for key in store.entries if "group" in key]


def connected():
  with socket.create_server(("127.0.0.1", 0)) as server:
    return socket.create_connection(server.getsockname()), server.accept()[0]


def pair():
  """A leader and its follower, which are processes 4 and 5."""
  ours, theirs = connected()
  return Channel(4, 4, {5: ours}, QUICK), Channel(5, 4, {4: theirs}, QUICK)


def message_of(call):
  with pytest.raises(ProcessFailed) as raised:
    while call() is not None:
      time.sleep(0.01)
  return str(raised.value)


def test_whoever_fails_says_why():
  leader, follower = pair()
  calls = []
  leader.on_failure(calls.append)
  follower.fail(ValueError("no memory"))
  expected = "Process 5, which follows in this sampler, has failed (ValueError: no memory)"
  assert message_of(lambda: leader.send(b"next") or 0).startswith(expected)
  assert calls == [leader.error] and leader.error.process == 5
  leader.on_failure(calls.append)  # late
  assert calls == [leader.error] * 2
  error = RuntimeError("a program failed")
  assert leader.explain(error) is leader.error and leader.explain(leader.error) is leader.error
  leader.close()

  leader, follower = pair()
  leader.fail(OSError("disk"))
  assert message_of(follower.receive).startswith("Process 4, which leads this sampler, has failed (OSError: disk)")
  follower.close()


def test_an_end_without_a_word_is_a_failure():
  leader, follower = pair()
  follower._peers[4].connection.shutdown(socket.SHUT_RDWR)
  assert "Process 5" in message_of(lambda: leader.send(b"next") or 0)
  assert "Process 4" in message_of(follower.receive)
  for channel in (leader, follower):
    channel.close()


def test_one_that_shows_no_sign_of_life_is_given_up():
  ours, theirs = connected()
  silent = Channel(1, 0, {0: ours}, QUICK)
  assert "Process 0, which leads this sampler, has shown no sign of life" in message_of(silent.receive)
  silent.close()
  theirs.close()


def test_one_that_lives_and_does_nothing_is_given_up():
  leader, follower = pair()
  thread = threading.Thread(target=lambda: [follower.receive() for _ in range(3)])
  thread.start()
  for _ in range(2):
    leader.send(b"")
  time.sleep(2 * QUICK.stuck)  # it waits for the third, which is no fault
  assert leader.error is None
  leader.send(b"never done")
  reason = str(leader.explain(RuntimeError("a program never ended")))
  assert reason.startswith("Process 5, which follows in this sampler, lives, and has done none of its next 1 calls")
  thread.join()
  for channel in (leader, follower):
    channel.close()


def test_strangers_are_sent_away_and_missing_followers_are_named():
  store, patience = SharedStore(), Patience(stuck=3)
  results = []

  def lead():
    try:
      results.append(open_channel(Processes(0, 3, store), (0, 1, 2), patience))
    except ProcessFailed as error:
      results.append(str(error))

  thread = threading.Thread(target=lead)
  thread.start()
  host, port, _ = Processes(1, 3, store).collect("group/0", 0)
  with socket.create_connection((host, port)) as stranger:
    stranger.sendall(bytes(24))
    assert stranger.recv(1) == b""
  follower = open_channel(Processes(1, 3, store), (0, 1, 2), patience)
  thread.join(20)
  assert results == ["Process 2, which follows in this sampler, has not come for 3 s."]
  follower.close()
