"""How a sampler of several processes, threads here, ends: by a signal to one that follows, and by its loss."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from absl import flags
from toys import training_toy
from toys.shared_store import SharedStore

from sao_jax.errors import ProcessFailed
from sao_jax.learner import sampler_side, setup
from sao_jax.parallel import agreement
from sao_jax.parallel.agreement import Processes, SharedStop
from sao_jax.parallel.group_channel import Channel
from sao_jax.sampler import follower
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.leader import LeadingService, Plan
from sao_jax.training import phases

SECONDS = 20.0  # only a hang takes as long


class Idle(Engine):
  """Has weights, and is asked for nothing."""

  version, params = 0, {}

  def __init__(self):
    pass


def connected():
  with socket.create_server(("127.0.0.1", 0)) as server:
    return socket.create_connection(server.getsockname()), server.accept()[0]


def wait_for(condition):
  end = time.monotonic() + SECONDS
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


@pytest.fixture
def sample(monkeypatch):
  """The names of `launch.sample`, whose flags are gone again: other programs define some of them, too."""
  before = set(flags.FLAGS)
  names = runpy.run_module("launch.sample", run_name="launch.sample")
  flags.FLAGS.remove_flag_values(set(flags.FLAGS) - before)
  names["main"].__globals__.update(_PHASE=SimpleNamespace(value=""), _PROMPT=SimpleNamespace(value=0))
  return names


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def number(request):
  """A signal that does what it does at a terminal: what starts the tests may have had it ignored."""
  previous = signal.signal(request.param, signal.SIG_DFL)
  yield request.param
  signal.signal(request.param, previous)


def test_a_signal_to_a_process_that_follows_ends_launch_sample_in_all(sample, number, monkeypatch):
  monkeypatch.setattr(agreement, "SLICE", 0.02)
  monkeypatch.setattr(follower, "POLL", 0.02)
  store, (ours, theirs) = SharedStore(), connected()
  channel = Channel(0, 0, {1: ours})
  service = FollowingService(Idle(), Channel(1, 0, {0: theirs}))

  # The program has a policy, and a place in a sampler that process 0 leads.
  devices, policy = SimpleNamespace(samples=True, follows=True), ({}, 0, "train", None)
  learner = SimpleNamespace(processes=Processes(1, 2, store), devices=devices)
  monkeypatch.setattr(setup, "make_learner", lambda config: learner)
  monkeypatch.setattr(phases, "latest_policy", lambda *arguments: policy)
  monkeypatch.setattr(sampler_side, "make_publisher", lambda learner: lambda params: params)
  monkeypatch.setattr(sampler_side, "make_service", lambda *arguments, **options: service)

  # The leader ends its plan when it hears of the signal, as it does where its episodes are given up.
  def lead():
    stop = SharedStop(SimpleNamespace(requested=False), Processes(0, 2, store))
    wait_for(lambda: service._stopping)  # the program waits, and has its handlers
    asked.append(stop.requested)
    os.kill(os.getpid(), number)
    wait_for(lambda: stop.requested)
    channel.close()

  asked, leader = [], threading.Thread(target=lead)
  leader.start()
  sample["main"](training_toy.get_config(), "")
  leader.join(SECONDS)
  assert not leader.is_alive() and asked == [False]
  assert [key for key in store.entries if "stop" in key] == ["sao_jax/stop/1"]
  assert (service.error, channel.error) == (None, None)
  assert signal.getsignal(number) == signal.SIG_DFL


def test_a_follower_that_cannot_be_reached_ends_the_sampler_by_its_name_and_by_nothing_else():
  """The thread that samples meets it first, as it sends: it must not wait for its own end."""
  ours, theirs = connected()
  channel = Channel(0, 0, {1: ours})
  plan, begin, failed = Plan(channel), threading.Event(), []

  def tick():
    begin.wait(SECONDS)
    with plan.call("release", 0):
      return True

  scheduler = SimpleNamespace(tick=tick, fail=failed.append)
  ours.shutdown(socket.SHUT_WR)
  service = LeadingService(scheduler, plan).start()
  begin.set()
  wait_for(lambda: failed)
  assert failed == [service.error] and isinstance(service.error, ProcessFailed)
  assert str(service.error).startswith("Process 1, which follows in this sampler, cannot be reached (")
  assert service.error.__cause__ is None
  theirs.close()
  service.stop()
