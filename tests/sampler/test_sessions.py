"""Trajectories of several turns on a fake engine: continued, parked, released, cut by the context."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from toys.sampler_fakes import answer, drain, generate, make, request

from sao_jax.sampler.requests import SessionReleasedError


def test_turns_continue_in_their_slot_without_a_new_prefill():
  engine, scheduler = make(num_slots=3)
  first = generate(scheduler, request(7, (1, 2), 5, keep_slot=True))
  assert first.token_ids.tolist() == answer((1, 2), 7, 5)
  ids = [1, 2, *first.token_ids.tolist(), 9, 8]
  second = generate(scheduler, request(7, (9, 8), 4, keep_slot=True))
  assert second.token_ids.tolist() == answer(ids, 7, 4)
  third = generate(scheduler, request(7, (), 3))
  assert third.token_ids.tolist() == answer([*ids, *second.token_ids.tolist()], 7, 3)
  extends = [entry for entry in engine.log if entry[0] == "extend"]
  assert [entry[2:4] for entry in extends] == [(0, 2), (6, 3), (12, 1)]  # each writes only what is new
  assert len({entry[1] for entry in extends}) == 1
  assert scheduler.stats()["free_slots"] == 3


def test_per_turn_cap_respects_the_context_left():  # A7
  _, scheduler = make(context_length=10)
  assert len(generate(scheduler, request(0, (1, 2, 3, 4), 4, keep_slot=True)).token_ids) == 4
  result = generate(scheduler, request(0, (5,), 4, keep_slot=True))
  assert len(result.token_ids) == 1 and result.finish_reason == "context"
  assert generate(scheduler, request(1, (1, 2, 3, 4), 4, keep_slot=True)).finish_reason == "length"
  assert len(generate(scheduler, request(1, (5,), 1, keep_slot=True)).token_ids) == 1
  result = generate(scheduler, request(1, range(20), 4))
  assert len(result.token_ids) == 0 and result.finish_reason == "context"
  assert result.logprobs.dtype == np.float32 and result.policy_versions.dtype == np.int32


def test_context_is_named_only_if_it_was_the_limit():
  _, scheduler = make(context_length=10)
  assert generate(scheduler, request(0, (1, 2, 3, 4), 6)).finish_reason == "length"  # exactly full
  assert generate(scheduler, request(1, (1, 2, 3, 4), 7)).finish_reason == "context"


def test_a_second_turn_at_once_is_refused():
  _, scheduler = make()
  results = []
  scheduler.submit(request(), results.append)
  scheduler.submit(request(), results.append)
  drain(scheduler)
  assert sorted(type(result).__name__ for result in results) == ["Completion", "ValueError"]


def test_released_turns_end_and_their_slots_come_back():
  _, scheduler = make(num_slots=1)
  results = []
  scheduler.submit(request(0, max_tokens=40), results.append)
  scheduler.submit(request(1, max_tokens=40), results.append)
  scheduler.submit(request(2, max_tokens=3), results.append)
  scheduler.tick()
  scheduler.release(0)  # decoding
  scheduler.release(1)  # queued
  scheduler.release(99)  # unknown
  drain(scheduler)
  assert [type(result) for result in results[:2]] == [SessionReleasedError] * 2
  assert results[2].token_ids.tolist() == answer((1, 2, 3), 2, 3)
  assert scheduler.stats()["free_slots"] == 1
  generate(scheduler, request(3, keep_slot=True))
  assert scheduler.stats()["waiting_sessions"] == 1
  scheduler.release(3)
  drain(scheduler)
  assert scheduler.stats()["waiting_sessions"] == 0 and scheduler.stats()["free_slots"] == 1


def test_parked_sessions_return_with_the_same_tokens():
  engine, scheduler = make(num_slots=2, park_after=2)
  ids = {i: [i, 1] for i in range(5)}
  for turn in range(3):
    for i in range(5):
      result = generate(scheduler, request(i, ids[i][-2:] if not turn else (turn,), 4, keep_slot=True))
      ids[i] += [turn] * bool(turn)
      assert result.token_ids.tolist() == answer(ids[i], i, 4)
      ids[i] += result.token_ids.tolist()
  assert scheduler.stats()["parked"] >= 10
  assert scheduler.stats()["waiting_sessions"] <= 2


def test_the_longest_idle_session_is_parked_and_only_when_turns_queue():
  engine, scheduler = make(num_slots=3, park_after=0)
  for i in (2, 0, 1):
    generate(scheduler, request(i, keep_slot=True))
  assert scheduler.stats()["parked"] == 0
  slots = {entry[4]: entry[1] for entry in engine.log if entry[0] == "extend"}
  generate(scheduler, request(9))
  assert scheduler.stats()["parked"] == 1
  assert next(entry[1] for entry in engine.log if entry[0] == "extend" and entry[4] == 9) == slots[2]


def test_a_session_that_just_stopped_is_not_parked_while_others_decode():
  _, scheduler = make(num_slots=2, park_after=3)
  done = []
  scheduler.submit(request(0, max_tokens=1, keep_slot=True), done.append)
  scheduler.submit(request(1, max_tokens=60), done.append)
  scheduler.tick()
  scheduler.tick()
  assert len(done) == 1
  scheduler.submit(request(2, max_tokens=1), done.append)
  scheduler.tick()
  assert scheduler.stats()["parked"] == 0
  for _ in range(3):
    scheduler.tick()
  assert scheduler.stats()["parked"] == 1


def test_returning_sessions_go_before_new_ones():
  _, scheduler = make(num_slots=1, park_after=0)
  generate(scheduler, request(0, keep_slot=True))
  generate(scheduler, request(1))  # parks session 0
  order = []
  scheduler.submit(request(2), lambda done: order.append(2))
  scheduler.submit(request(0, (4,)), lambda done: order.append(0))
  drain(scheduler)
  assert order == [0, 2]


@given(st.data())
def test_any_mixture_of_turns_gets_its_tokens(data):
  """Sessions of several turns, stop ids, publishes, few slots: every turn equals the lone reference."""
  draw = data.draw
  engine, scheduler = make(
    num_slots=draw(st.integers(1, 3)),
    context_length=40,
    decode_steps=draw(st.integers(1, 5)),
    decode_batch=draw(st.integers(1, 3)),
    kv_after_publish=draw(st.sampled_from(["keep", "reprefill"])),
    park_after=draw(st.integers(0, 3)),
    prefill_chunk=draw(st.sampled_from([0, 1, 3, 8])),  # 0: prompts are read whole
  )
  turns = {i: draw(st.integers(1, 3)) for i in range(draw(st.integers(1, 6)))}
  ids: dict[int, list[int]] = {i: [] for i in turns}
  running: dict[int, tuple[tuple[int, ...], object]] = {}
  results: dict[int, object] = {}

  def start(i):
    new = tuple(draw(st.lists(st.integers(0, 96), min_size=0 if ids[i] else 1, max_size=6)))
    req = request(i, new, draw(st.integers(1, 12)), stop_ids=(3, 50), keep_slot=True)
    ids[i] += new
    running[i] = req
    scheduler.submit(req, lambda done, i=i: results.setdefault(i, done))

  for i in turns:
    start(i)
  version = 0
  for _ in range(600):
    if not running:
      break
    scheduler.tick()
    if draw(st.integers(0, 9)) == 0 and version < 5:
      version += 1
      scheduler.publish(None, version)
    for i in list(results):
      done, req = results.pop(i), running.pop(i)
      room = 40 - len(ids[i])
      for token, tag in zip(done.token_ids.tolist(), done.policy_versions.tolist(), strict=True):
        assert token == answer(ids[i], i, 1, tag)[0]
        ids[i].append(token)
      sampled = len(done.token_ids)
      if done.finish_reason == "stop":
        assert done.token_ids[-1] in (3, 50) and not set(done.token_ids[:-1].tolist()) & {3, 50}
      else:
        assert sampled == max(0, min(req.max_tokens, room))
        assert done.finish_reason == ("length" if sampled == req.max_tokens else "context")
      turns[i] -= 1
      if turns[i] and len(ids[i]) < 40:
        start(i)
      else:
        scheduler.release(i)
  assert not running
  drain(scheduler)
  assert scheduler.stats()["free_slots"] == len(engine.slots)
