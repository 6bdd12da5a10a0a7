"""One writer per run in a bucket: who waits, who is refused, and who takes over from the dead."""

from __future__ import annotations

import json

import pytest
import tensorstore
from absl import logging

from sao_jax import bucket_lock
from sao_jax.bucket_lock import BucketLock, LockLost
from sao_jax.errors import ConfigError
from sao_jax.run_lock import LOCK_FILE

FIRST, SECOND = ({"pid": pid, "host": f"host-{pid}", "since": "2026", "command": "train"} for pid in (1, 2))


class Time:
  """Passes only when somebody sleeps; others act meanwhile."""

  def __init__(self):
    self.now, self.acts = 0.0, []

  def clock(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
    for act in self.acts:
      act()


@pytest.fixture
def store():
  return tensorstore.KvStore.open({"driver": "memory", "path": "run/"}).result()


@pytest.fixture
def time():
  return Time()


@pytest.fixture
def said(monkeypatch):
  lines = []
  for level in ("info", "warning"):
    monkeypatch.setattr(logging, level, lambda message, *arguments: lines.append(message % arguments))
  return lines


def lock(store, holder, time):
  return BucketLock(store, "gs://bucket/run", holder, clock=time.clock, sleep=time.sleep)


def held_by(store):
  read = store.read(LOCK_FILE).result()
  return None if read.state == "missing" else json.loads(read.value)["holder"]


def test_the_second_waits_for_one_that_lives_names_it_and_is_refused(store, time, said):
  first = lock(store, FIRST, time)
  first.acquire(0.0)
  time.acts.append(first.renew)
  with pytest.raises(ConfigError, match=r"another run \(pid 1 on host-1, since 2026: train\) holds gs://bucket/run"):
    lock(store, SECOND, time).acquire(100.0)
  assert time.now == 100.0 and held_by(store) == FIRST
  assert len(said) == 1 and said[0].startswith("Waiting up to 100 s: another run (pid 1")


def test_it_goes_on_once_the_first_has_ended_without_a_trace_of_it(store, time, said):
  first = lock(store, FIRST, time)
  first.acquire(0.0)
  time.acts.append(lambda: time.now >= 20.0 and first.release())
  lock(store, SECOND, time).acquire(100.0)
  assert time.now == 20.0 and held_by(store) == SECOND
  first.release()  # not its own any more
  assert held_by(store) == SECOND and not any("Took over" in line for line in said)


def test_a_dead_one_expires_whatever_the_patience_and_must_not_write_if_it_wakes(store, time, said):
  first, second = lock(store, FIRST, time), lock(store, SECOND, time)
  first.acquire(0.0)
  second.acquire(0.0)
  assert time.now == bucket_lock.EXPIRY and held_by(store) == SECOND
  assert "Took over the lock of gs://bucket/run from another run (pid 1" in said[-1]
  with pytest.raises(LockLost, match=r"was taken by another run \(pid 2 on host-2"):
    first.renew()
  second.renew()
  assert held_by(store) == SECOND
  second.release()
  with pytest.raises(LockLost, match="somebody who has removed it"):
    second.renew()


def test_one_that_is_known_to_be_dead_is_not_waited_for(store, time, said):
  lock(store, FIRST, time).acquire(0.0)
  lock(store, SECOND, time).acquire(0.0, dead=FIRST)
  assert time.now == 0.0 and "that process has ended" in said[-1]


def test_of_two_that_take_it_at_once_one_waits(store, time):
  class Overtaken:
    """Another run writes between the look and the write."""

    def read(self, key):
      result = store.read(key)
      if result.result().state == "missing":
        lock(store, SECOND, time).acquire(0.0)
      return result

    def write(self, *arguments, **options):
      return store.write(*arguments, **options)

  with pytest.raises(ConfigError, match=r"another run \(pid 2"):
    lock(Overtaken(), FIRST, time).acquire(0.0)
  assert held_by(store) == SECOND


def test_one_does_not_wait_for_itself_if_an_answer_was_lost(store, time, said):
  class Forgetful:
    """The first write is tried again, and finds that it has been done."""

    def read(self, key):
      return store.read(key)

    def write(self, *arguments, **options):
      if held_by(store) is None:
        store.write(*arguments, **options).result()
      return store.write(*arguments, **options)

  first = lock(Forgetful(), FIRST, time)
  first.acquire(0.0)
  assert time.now == 0.0 and not said
  first.renew()
  first.release()
  assert held_by(store) is None


def test_a_renewal_whose_answer_was_lost_is_no_loss(store, time):
  first = lock(store, FIRST, time)
  first.acquire(0.0)
  before, first._generation = first._generation, b"of the write before"
  first.renew()
  assert first._generation not in (before, b"of the write before") and held_by(store) == FIRST


def test_what_is_no_lock_of_ours_holds_until_it_expires(store, time):
  store.write(LOCK_FILE, b"{").result()
  lock(store, FIRST, time).acquire(0.0)
  assert time.now == bucket_lock.EXPIRY
