"""Who is there is known before processes join, who is missing is named, and who dies later is noticed at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import time

import pytest

from sao_jax.errors import ProcessFailed, RunError
from sao_jax.parallel import roll_call
from sao_jax.parallel.roll_call import call_roll

BAD = ProcessFailed("Process 2 has failed (ConfigError: nix).", 2, 2)


@pytest.fixture
def address():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def together(address, *calls):
  """What each call of the roll gives, made at the same time, for (count, index, seconds, failure)."""

  def call(count, index, seconds, failure=None):
    try:
      lines = call_roll(address, count, index, seconds, loopback=True, failure=failure)
    except RunError as error:
      return error
    if index == 0:  # as jax's service has the port next
      host, port = address.split(":")
      with socket.create_server((host, int(port))):
        time.sleep(0.2)
    return lines

  with concurrent.futures.ThreadPoolExecutor() as threads:
    return [future.result() for future in [threads.submit(call, *each) for each in calls]]


def test_all_that_come_go_on_and_a_death_is_seen_but_a_farewell_means_nothing(address):
  lines = together(address, (3, 0, 20), (3, 1, 20), (3, 2, 20))
  assert lines[0].lost(0) is None and lines[1].lost(0) is None

  lines[1].close()
  assert lines[0].lost(1) is None
  lines[2]._connections[0].close()  # as the end of a process has it
  assert lines[0].lost(1) == 2 and lines[0].lost(0) is None
  lines[0].close()


def test_the_failure_of_one_ends_all_at_once_with_its_status(address):
  ends = together(address, (3, 0, 20), (3, 1, 20), (3, 2, 20, BAD))
  assert [(str(end), end.process, end.status) for end in ends] == 3 * [(str(BAD), 2, 2)]


def test_that_of_the_first_process_too(address):
  first = ProcessFailed("Process 0 has failed (ConfigError: nix).", 0, 2)
  ends = together(address, (2, 0, 20, first), (2, 1, 20))
  assert [(str(end), end.process, end.status) for end in ends] == 2 * [(str(first), 0, 2)]


def test_who_has_not_come_is_named_to_those_that_have(address):
  ends = together(address, (4, 0, 0.5), (4, 2, 20))
  for end in ends:
    assert "processes 1, 3 of 4 did not come" in str(end) and "--join_timeout" in str(end)

  (end,) = together(address, (2, 1, 0.3))
  assert f"Process 1 of 2 has not found process 0 at {address}" in str(end)


def test_processes_that_do_not_agree_on_who_they_are_end(address):
  ends = together(address, (2, 0, 20), (3, 1, 20))
  assert ["Process 1 says that they are 3, process 0 that they are 2" in str(end) for end in ends] == [True, True]
  ends = together(address, (3, 0, 1), (3, 1, 20), (3, 1, 20))
  assert ["Two processes say that they are number 1" in str(end) for end in ends] == [True] * 3


def test_strangers_at_the_port_and_one_that_is_ended_while_it_waits_are_passed_over(address):
  host, port = address.split(":")

  def stranger(said):
    for _ in range(100):
      with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as connection:
        connection.sendall(said)
        return
      time.sleep(0.02)

  with concurrent.futures.ThreadPoolExecutor() as threads:
    others = [b"PRI * HTTP/2.0\r\n\n", b"", b"[1]\n", b'{"process": 1, "count": 3, "failure": null}\n']
    odd = (b"[1]", b'"1"', b"0", b"3", b"true")
    others += [b'{"process": %s, "count": 3, "failure": null}\n' % process for process in odd]
    others.append(b'{"process": 1, "count": 3, "failure": {"odd": 1}}\n')
    strangers = [threads.submit(stranger, said) for said in others]
    lines = together(address, (3, 0, 20), (3, 2, 20), (3, 1, 20))
    for each in strangers:
      each.result()
  assert [lines[0].lost(0), lines[1].lost(0), lines[2].lost(0)] == [None] * 3


def test_a_port_that_stays_taken_is_refused(address, monkeypatch):
  monkeypatch.setattr(roll_call, "_PATIENCE", 0.1)
  host, port = address.split(":")
  with socket.create_server((host, int(port))), pytest.raises(RunError, match="cannot listen at port"):
    call_roll(address, 2, 0, 5, loopback=True)
