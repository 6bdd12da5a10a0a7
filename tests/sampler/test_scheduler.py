"""The slot scheduler on a fake engine whose tokens depend on everything that a slot holds."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from toys.sampler_fakes import answer, drain, generate, make, request

from sao_jax.errors import ConfigError
from sao_jax.sampler.dispatch_length import best_num_steps
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.requests import SessionReleasedError


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

  def overflowing(num_steps, lengths, *others):
    dispatch = decode(num_steps, lengths, *others)
    return dataclasses.replace(dispatch, arrays=(*dispatch.arrays[:3], np.ones(len(lengths), bool), None))

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


def test_the_time_of_slots_is_told_apart():
  """One second a tick: 2 of 3 slots take a turn, one of which ends and waits for its environment; the third is free."""
  now = [0.0]
  _, scheduler = make(num_slots=3, decode_steps=4, clock=lambda: now[0])
  scheduler.submit(request(0, max_tokens=4, keep_slot=True), lambda result: None)
  scheduler.submit(request(1, max_tokens=8), lambda result: None)
  spent = []
  for _ in range(5):
    scheduler.tick()
    now[0] += 1.0
    seconds = scheduler.stats()
    spent.append([seconds[f"{state}_slot_seconds"] for state in ("decoding", "prefilling", "waiting", "free")])
  rounds = np.diff([[0.0] * 4, *spent], axis=0).tolist()
  assert rounds == [
    [0, 2, 0, 1],  # both begin
    [2, 0, 0, 1],  # one ends in the dispatch that is read now, the other in the next
    [1, 0, 1, 1],
    [0, 0, 1, 2],
    [0, 0, 1, 2],
  ]


def test_a_session_keeps_its_own_weights_in_dispatches_of_their_own_while_others_go_on_to_newer_ones():
  for policy in ("keep", "reprefill"):
    engine, scheduler = make(num_slots=4, decode_steps=2, kv_after_publish=policy)
    pinned, results = Weights(None, 7, None), {}
    for session in range(4):
      weights = pinned if session % 2 else None
      scheduler.submit(request(session, max_tokens=6, weights=weights), functools.partial(results.__setitem__, session))
    scheduler.tick()
    scheduler.publish(None, 1)
    drain(scheduler)
    assert [set(results[session].policy_versions) for session in range(4)] == [{0, 1}, {7}, {0, 1}, {7}]
    assert results[1].token_ids.tolist() == answer([1, 2, 3], 1, 6, version=7)
    decodes = [(slots, version) for kind, *rest in engine.log if kind == "decode" for _, slots, version in [rest]]
    assert {slots for slots, version in decodes if version == 7} == {(1, 3)}
    assert {slots for slots, version in decodes if version != 7} == {(0, 2)}


def test_a_long_prompt_is_read_in_chunks_while_others_decode():
  engine, scheduler = make(num_slots=3, decode_steps=4, prefill_chunk=8, keep_experts=True)
  results, long = {}, tuple(range(30))
  scheduler.submit(request(0, (1, 2, 3), 20), functools.partial(results.__setitem__, 0))
  scheduler.tick()
  scheduler.submit(request(1, long, 4), functools.partial(results.__setitem__, 1))
  scheduler.submit(request(2, (5, 6), 2), functools.partial(results.__setitem__, 2))
  drain(scheduler)
  ticks, pieces = [], []
  for entry in engine.log:
    if entry[0] == "extend":
      pieces.append((entry[1], entry[3] - 1))
    else:
      ticks.append((pieces, *entry[1:3]))
      pieces = []

  # The one that decodes gets a token with every chunk; whoever came last has its turn behind those before it.
  assert ticks[:6] == [
    ([(0, 2)], 4, (0,)),
    ([(1, 8)], 1, (0,)),
    ([(1, 8)], 1, (0,)),
    ([(1, 8)], 1, (0,)),
    ([(1, 5), (2, 1)], 4, (0, 1, 2)),
    ([], 4, (0,)),
  ]
  for session, tokens, count in ((0, (1, 2, 3), 20), (1, long, 4), (2, (5, 6), 2)):
    assert results[session].token_ids.tolist() == answer(tokens, session, count)
    read = [*tokens, *results[session].token_ids.tolist()][:-1]
    assert results[session].routed_experts[:, 0].tolist() == [[i, token, 0] for i, token in enumerate(read)]
  assert scheduler.stats()["prefilled_tokens"] == 2 + 29 + 1


@pytest.mark.parametrize("kept", ["keep", "reprefill"])
def test_a_publish_amid_a_prompt_begins_it_anew_where_caches_are_recomputed(kept):
  engine, scheduler = make(num_slots=1, prefill_chunk=8, kv_after_publish=kept)
  results = []
  scheduler.submit(request(0, range(20), 3), results.append)
  scheduler.tick()
  scheduler.publish(None, 1)
  drain(scheduler)
  starts = [entry[2] for entry in engine.log if entry[0] == "extend"]
  assert starts == ([0, 8, 16] if kept == "keep" else [0, 0, 8, 16])
  assert results[0].token_ids.tolist() == answer(range(20), 0, 3, version=1)
  assert scheduler.stats()["reprefilled"] == (kept == "reprefill")


def test_a_session_that_is_released_amid_its_prompt_leaves_nothing_behind():
  engine, scheduler = make(num_slots=1, context_length=32, num_pages=8, prefill_chunk=4)
  results = []
  scheduler.submit(request(0, range(20), 3), results.append)
  scheduler.tick()
  scheduler.release(0)
  drain(scheduler)
  assert isinstance(results[0], SessionReleasedError) and engine.pool.num_free(0) == 8
  assert generate(scheduler, request(1, (4, 5), 3)).token_ids.tolist() == answer((4, 5), 1, 3)
