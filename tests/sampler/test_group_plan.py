"""The calls of an engine as bytes."""

from __future__ import annotations

import inspect

import numpy as np

from sao_jax.sampler.engine import Engine
from sao_jax.sampler.group_plan import CALLS, Call, WeightsName, decode, encode
from sao_jax.sampler.leader import LeadingEngine
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


def test_whatever_changes_an_engine_is_led():
  """A method of an engine that is not named here starts a program, or changes what later ones do."""
  changes_nothing = {"decode_batch", "share_room", "num_free_pages", "check_params", "reads_prompts", "take_pieces"}
  public = {name for name in vars(Engine) if not name.startswith("_")}
  assert public - changes_nothing == CALLS
  assert {name for name in vars(LeadingEngine) if not name.startswith("_")} == CALLS
  for name in CALLS:
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (LeadingEngine, Engine))
    assert list(ours) == list(theirs)
