"""The calls of an engine as bytes."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.errors import ConfigError, RunError
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.follower import follow
from sao_jax.sampler.group_plan import CALLS, Call, WeightsName, decode, encode
from sao_jax.sampler.leader import LeadingEngine, Plan
from sao_jax.sampler.prefill import Extension, Piece

LONG = Extension(3, 5, list(range(100, 150)), 2**31 - 1, 20, stop_ids=(2, 7), temperature=0.1 + 0.2, random_offset=9)
SHORT = Extension(slot=0, start=0, token_ids=[4], rollout_id=1, budget=2)


def test_calls_come_back_as_they_were():
  calls = [
    Call("reserve", (np.int32(3), 17)),
    Call("extend", ([LONG, SHORT], None)),
    Call("decode", (4, {np.int64(2): np.int32(9), 0: 17}, WeightsName(7, (1, 2**32 - 1)))),
    Call("extend", ([SHORT], None)),
    Call("warm_up", (True,)),
  ]
  back = decode(encode(calls))
  assert back == [Call(name, tuple(arguments)) for name, arguments in calls]
  assert list(back[2].arguments[1]) == [2, 0]  # the order of rows
  assert type(back[0].arguments[0]) is int
  assert len(encode([Call("extend", ([LONG], None))])) < 400 + 4 * len(LONG.token_ids)


def test_a_piece_writes_the_same_and_takes_no_more_than_itself():
  for offset, count, last in ((10, 8, False), (40, 9, True), (0, 49, True)):
    piece = Piece(LONG, offset, count, last)
    (call,) = decode(encode([Call("decode", (1, {}, None, [piece]))]))
    (back,) = call.arguments[3]
    assert (back.start, back.token_ids, back.count, back.last) == (piece.start, piece.token_ids, count, last)
    assert back.extension.token_ids[-1] == LONG.token_ids[-1]  # pending
    assert len(back.extension.token_ids) == count + 1
    for field in ("slot", "rollout_id", "budget", "stop_ids", "temperature", "random_offset"):
      assert getattr(back.extension, field) == getattr(LONG, field)


class Sent:
  """A channel that keeps what is sent."""

  error = None

  def __init__(self):
    self.messages = []

  def send(self, message):
    self.messages.append([tuple(call) for call in decode(message)])

  def explained(self):
    return contextlib.nullcontext()


def test_weights_are_known_by_their_version_as_long_as_the_leader_has_them():
  channel = Sent()
  plan = Plan(channel)
  params = [{"w": jnp.full(3, version)} for version in range(3)]
  for version in (0, 1):
    plan.hold(version, params[version])
  pinned = Weights(params[0], 0, jax.random.key(5))
  assert plan.name(None) is None
  assert plan.name(pinned) == WeightsName(0, tuple(jax.random.key_data(jax.random.key(5)).tolist()))
  for strange in (Weights(params[2], 2, pinned.key), Weights(params[2], 1, pinned.key)):
    with pytest.raises(ConfigError, match="never published"):
      plan.name(strange)

  with plan.call("publish", 1):
    pass
  params[0] = pinned = None
  plan.note("release", 3)
  with plan.turn("publish"):
    assert channel.messages == [
      [("publish", (1,))],
      [("free", ([0],)), ("release", (3,)), ("turn", ("publish",))],
    ]
  with plan.call("release", 4):
    assert channel.messages[2:] == [[("release", (4,))]]


def test_whoever_asks_for_a_turn_comes_before_the_next_call():
  channel = Sent()
  plan = Plan(channel)
  calls, asked = [], threading.Event()

  def ask():
    asked.set()
    with plan.turn("sum"):
      calls.append("turn")

  thread = threading.Thread(target=ask)
  with plan.call("release", 0):
    thread.start()
    asked.wait()
    while not plan._turns:
      time.sleep(0.001)
    assert calls == []  # one at a time
  with plan.call("release", 1):
    calls.append("call")
  thread.join()
  assert calls == ["turn", "call"]
  assert [message[-1][0] for message in channel.messages] == ["release", "turn", "release"]


class Followed(Engine):
  """An engine that keeps its calls, and its own surroundings."""

  def __init__(self):
    self.calls = []

  def decode(self, num_steps, lengths, weights, pieces):
    self.calls.append(("decode", num_steps, lengths, weights))

  def publish(self, params, version):
    self.calls.append(("publish", params, version))

  def weights(self, version):
    return {"w": version}

  def free(self, versions):
    self.calls.append(("free", versions))

  def take_turn(self, name):
    self.calls.append(("turn", name))


def test_a_follower_makes_the_calls_and_no_others():
  engine, key = Followed(), jax.random.key(4)
  name = WeightsName(3, tuple(jax.random.key_data(key).tolist()))
  messages = [
    encode([Call("free", ([1, 2],)), Call("decode", (2, {0: 5}, name, []))]),
    encode([Call("turn", ("publish",)), Call("publish", (7,))]),
    None,
  ]
  follow(engine, iter(messages).__next__, engine)
  freed, (_, steps, lengths, weights), *rest = engine.calls
  assert freed == ("free", [1, 2]) and (steps, lengths) == (2, {0: 5})
  assert (weights.params, weights.version) == ({"w": 3}, 3)
  assert jnp.array_equal(jax.random.key_data(weights.key), jax.random.key_data(key))
  assert rest == [("turn", "publish"), ("publish", {"w": 7}, 7)]
  with pytest.raises(RunError, match="calls '_decode', which is unknown here"):
    follow(engine, iter([encode([Call("_decode", ())])]).__next__, engine)


def test_whatever_changes_an_engine_is_led():
  """A method of an engine that is not named here starts a program, or changes what later ones do."""
  changes_nothing = {"decode_batch", "share_room", "num_free_pages", "check_params", "reads_prompts", "take_pieces"}
  public = {name for name in vars(Engine) if not name.startswith("_")}
  assert public - changes_nothing == CALLS
  assert {name for name in vars(LeadingEngine) if not name.startswith("_")} == CALLS
  for name in CALLS:
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (LeadingEngine, Engine))
    assert list(ours) == list(theirs)
