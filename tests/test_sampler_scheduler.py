"""The slot scheduler on a fake engine whose tokens depend on everything that a slot holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampler_fakes import FakeEngine, answer

from sao_jax.config import SamplerConfig
from sao_jax.errors import ConfigError
from sao_jax.sampler.requests import GenerateRequest, SessionReleasedError
from sao_jax.sampler.scheduler import Scheduler, best_num_steps


def make(num_slots=2, context_length=64, decode_steps=4, decode_batch=16, kv_after_publish="keep", **kwargs):
  config = SamplerConfig(
    num_slots=num_slots,
    context_length=context_length,
    decode_steps=decode_steps,
    decode_batch=decode_batch,
    kv_after_publish=kv_after_publish,
  )
  engine = FakeEngine(config)
  return engine, Scheduler(engine, **kwargs)


def request(session=0, tokens=(1, 2, 3), max_tokens=5, rollout=None, **kwargs):
  rollout = session if rollout is None else rollout
  return GenerateRequest(session, rollout, tuple(tokens), max_tokens, **kwargs)


def drain(scheduler, limit=1000):
  for _ in range(limit):
    if not scheduler.tick():
      return
  raise AssertionError("the scheduler never came to rest")


def generate(scheduler, req):
  results = []
  scheduler.submit(req, results.append)
  drain(scheduler)
  assert len(results) == 1
  if isinstance(results[0], BaseException):
    raise results[0]
  return results[0]


def test_finished_slots_are_refilled_while_others_go_on():
  engine, scheduler = make(num_slots=2)
  results = {}
  budgets = [40, 3, 5, 2, 9, 1]
  for i, budget in enumerate(budgets):
    scheduler.submit(request(i, (i, 1), budget), lambda done, i=i: results.setdefault(i, done))
  drain(scheduler)
  for i, budget in enumerate(budgets):
    assert results[i].token_ids.tolist() == answer((i, 1), i, budget)
    assert results[i].finish_reason == "length"
  assert list(results) == [1, 2, 3, 4, 5, 0]  # the long one held nobody up
  assert sum(entry[0] == "extend" and entry[1] == 0 for entry in engine.log) == 1
  assert scheduler.stats()["free_slots"] == 2


def test_a_budget_that_ends_in_a_dispatch_is_refilled_before_it_is_read():
  engine, scheduler = make(num_slots=1, decode_steps=4)
  for i in range(4):
    scheduler.submit(request(i, max_tokens=4), lambda done: None)
  drain(scheduler)
  assert [entry[0] for entry in engine.log] == ["extend", "decode"] * 4  # no dispatch without a live slot


def test_stop_tokens_stay_and_end_the_turn():  # M2
  _, scheduler = make()
  free = answer((1, 2, 3), 0, 8)
  stop = next(token for i, token in enumerate(free) if i == free.index(token) and i >= 2)
  cut = free[: free.index(stop) + 1]
  result = generate(scheduler, request(max_tokens=8, stop_ids=(95 if stop != 95 else 94, stop, 96)))
  assert result.token_ids.tolist() == cut and result.finish_reason == "stop"
  assert len(result.logprobs) == len(result.policy_versions) == len(cut)
  result = generate(scheduler, request(1, max_tokens=len(cut), rollout=0, stop_ids=(stop,)))
  assert result.finish_reason == "stop"  # on the last token of the budget
  result = generate(scheduler, request(2, max_tokens=len(cut) - 1, rollout=0, stop_ids=(stop,)))
  assert result.token_ids.tolist() == cut[:-1] and result.finish_reason == "length"  # nothing is appended


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


def test_versions_are_stamped_when_sampled():  # A2, L12
  engine, scheduler = make(decode_steps=2)
  engine.version = 10
  results = []
  scheduler.submit(request(max_tokens=3), results.append)
  scheduler.tick()
  scheduler.tick()  # the whole turn is started
  scheduler.publish(None, 11)
  drain(scheduler)
  assert results[0].policy_versions.tolist() == [10, 10, 10]
  scheduler.submit(request(1, max_tokens=6), results.append)
  scheduler.tick()
  scheduler.publish(None, 12)
  drain(scheduler)
  assert results[1].policy_versions.tolist() == [11, 11, 12, 12, 12, 12]
  assert scheduler.version == 12 and scheduler.stats()["publishes"] == 2


def test_of_several_publishes_the_last_counts():
  engine, scheduler = make()
  for version in (3, 4, 5):
    scheduler.publish(None, version)
  scheduler.tick()
  assert [entry for entry in engine.log if entry[0] == "publish"] == [("publish", 5)]


@pytest.mark.parametrize("policy", ["keep", "reprefill"])
def test_budget_over_interruptions_is_exact(policy):  # A6
  _, scheduler = make(context_length=600, decode_steps=8, kv_after_publish=policy)
  options = request(max_tokens=512, tokens=(4, 5))
  before = dataclasses.asdict(options)
  results = []
  scheduler.submit(options, results.append)
  for version in range(1, 2000):
    if not scheduler.tick():
      break
    scheduler.publish(None, version)
  assert len(results[0].token_ids) == 512 and results[0].finish_reason == "length"
  assert dataclasses.asdict(options) == before
  assert len(set(results[0].policy_versions.tolist())) > 50
  assert np.all(np.diff(results[0].policy_versions) >= 0)
  prefix = [4, 5]
  for token, version in zip(results[0].token_ids.tolist(), results[0].policy_versions.tolist(), strict=True):
    assert token == answer(prefix, 0, 1, version)[0]
    prefix.append(token)


def test_reprefill_recomputes_running_turns_now_and_waiting_sessions_when_they_return():
  engine, scheduler = make(num_slots=3, kv_after_publish="reprefill")
  first = generate(scheduler, request(0, (1, 2), 3, keep_slot=True))
  results = []
  scheduler.submit(request(1, (5, 6, 7), 20), results.append)
  scheduler.tick()
  engine.log.clear()
  scheduler.publish(None, 1)
  scheduler.tick()
  assert engine.log[0] == ("publish", 1)
  assert [entry[2] for entry in engine.log if entry[0] == "extend"] == [0]  # the running one, from its start
  drain(scheduler)
  engine.log.clear()
  second = generate(scheduler, request(0, (9,), 2))
  assert engine.log[0][2:4] == (0, 6)  # two prompt, three sampled, one observed
  assert second.token_ids.tolist() == answer([1, 2, *first.token_ids.tolist(), 9], 0, 2, version=1)
  assert scheduler.stats()["reprefilled"] == 1


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


@pytest.mark.parametrize(
  ("bad", "field"),
  [
    (request(tokens=range(64)), "sampler.context_length"),
    (request(tokens=range(100)), "sampler.context_length"),
    (request(tokens=()), "new_token_ids"),
    (request(max_tokens=0), "max_tokens"),
    (request(tokens=(1, -1)), "new_token_ids"),
    (request(tokens=(1, 1000)), "new_token_ids"),
    (dataclasses.replace(request(), stop_ids=(1000,)), "stop_ids"),
    (dataclasses.replace(request(), stop_ids=tuple(range(9))), "stop_ids"),
    (dataclasses.replace(request(), rollout_id=2**31), "rollout_id"),
    (dataclasses.replace(request(), rollout_id=-1), "rollout_id"),
    (dataclasses.replace(request(), temperature=-1.0), "temperature"),
    (dataclasses.replace(request(), temperature=float("nan")), "temperature"),
  ],
)
def test_bad_requests_reach_their_caller_alone(bad, field):
  _, scheduler = make()
  with pytest.raises(ConfigError) as error:
    generate(scheduler, bad)
  assert error.value.field == field
  assert generate(scheduler, request(5)).finish_reason == "length"


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


def test_failing_ends_every_turn():
  engine, scheduler = make(num_slots=1)
  results = []
  for i in range(3):
    scheduler.submit(request(i), results.append)
  engine.broken = RuntimeError("device lost")
  with pytest.raises(RuntimeError, match="device lost"):
    scheduler.tick()
  scheduler.fail(engine.broken)
  assert results == [engine.broken] * 3
  scheduler.submit(request(9), results.append)
  scheduler.fail(engine.broken)
  assert results == [engine.broken] * 4


def test_overflow_is_an_error():  # L10: the flag of the device reaches the host
  engine, scheduler = make()
  decode = engine.decode

  def overflowing(num_steps, lengths):
    dispatch = decode(num_steps, lengths)
    return dataclasses.replace(dispatch, arrays=(*dispatch.arrays[:3], np.ones(len(lengths), bool)))

  engine.decode = overflowing
  scheduler.submit(request(), lambda done: None)
  with pytest.raises(RuntimeError, match="overflow"):
    drain(scheduler)


def test_number_of_steps():
  full = lambda *left: np.array(left, np.int32)
  assert best_num_steps(full(100, 90), 8) == 8
  assert best_num_steps(full(3, 3, 3), 8) == 3
  assert best_num_steps(full(3, 100, 100, 100), 8, overhead=0.5) == 3  # 12 / 3.5 > 27 / 8.5
  assert best_num_steps(full(3, 100, 100, 100), 8, overhead=2.0) == 8  # 12 / 5 < 27 / 10
  assert best_num_steps(full(2, 2, 2, 100), 8) == 2
  assert best_num_steps(full(1), 1) == 1


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
