"""Slots share pages, and a scheduler that runs out of them loses nothing."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
from toys.sampler_fakes import answer, drain, generate, make, request

from sao_jax.sampler.page_pool import PagePool
from sao_jax.sampler.requests import SessionReleasedError

OPERATIONS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40)


@hypothesis.given(operations=OPERATIONS)
def test_no_page_has_two_owners_and_none_is_lost(operations):
  """Slots 0-2 and 3-5 have pools of their own. A length of 0 gives everything back."""
  pool, held = PagePool(num_slots=6, pages_per_slot=5, num_pages=9, page_size=8, parts=2), [0] * 6
  for slot, length in operations:
    before = held.copy()
    if not length:
      pool.release(slot)
      held[slot] = 0
    elif pool.reserve(slot, length):
      held[slot] = max(held[slot], -(-length // 8))
    else:
      part = range(slot // 3 * 3, slot // 3 * 3 + 3)
      assert sum(before[other] for other in part if other != slot) + -(-length // 8) > 9
    for part in (range(3), range(3, 6)):
      pages = [page for other in part for page in pool.table[other, : held[other]]]
      assert len(set(pages)) == len(pages) == 9 - pool.num_free(part[0])
      assert all(0 <= page < 9 for page in pages)


def test_a_pool_holds_one_context_at_least():
  with pytest.raises(ValueError, match="4 pages"):
    PagePool(num_slots=2, pages_per_slot=5, num_pages=4, page_size=8)


def test_turns_that_need_more_pages_than_there_are_give_way_and_end_as_always():
  """Eight pages of 4 tokens for four turns of 25 tokens, of which two fit: the oldest is never held up."""
  _, scheduler = make(num_slots=4, context_length=32, decode_steps=2, num_pages=8)
  done = {}
  for i in range(4):
    scheduler.submit(request(i, (i, 1, 2), 22), lambda result, i=i: done.setdefault(i, result))
  drain(scheduler)
  assert [done[i].token_ids.tolist() for i in range(4)] == [answer((i, 1, 2), i, 22) for i in range(4)]
  assert next(iter(done)) == 0
  stats = scheduler.stats()
  assert stats["preempted"] > 0 and stats["parked"] == 0 and stats["free_slots"] == 4


def test_pages_of_waiting_sessions_are_taken_before_running_turns_give_way():
  _, scheduler = make(num_slots=3, context_length=32, decode_steps=2, num_pages=8, park_after=100)
  first = generate(scheduler, request(0, (1, 2), 10, keep_slot=True))  # holds three pages and waits
  done = []
  scheduler.submit(request(1, (3, 4), 28), done.append)
  drain(scheduler)
  assert done[0].token_ids.tolist() == answer((3, 4), 1, 28)
  assert (scheduler.stats()["parked"], scheduler.stats()["preempted"]) == (1, 0)
  ids = [1, 2, *first.token_ids.tolist(), 5]
  assert generate(scheduler, request(0, (5,), 4)).token_ids.tolist() == answer(ids, 0, 4)


def test_a_new_context_gives_the_pages_of_the_old_one_back():
  _, scheduler = make(num_slots=2, context_length=32, decode_steps=2, num_pages=8)
  generate(scheduler, request(0, (1, 2), 20, keep_slot=True))  # holds six pages
  done = {}
  scheduler.submit(request(0, (5,), 10, new_context=True), lambda result: done.setdefault(0, result))
  scheduler.submit(request(1, (3, 4), 16), lambda result: done.setdefault(1, result))
  drain(scheduler)
  assert done[1].token_ids.tolist() == answer((3, 4), 1, 16) and len(done[0].token_ids) == 10
  assert (scheduler.stats()["parked"], scheduler.stats()["preempted"]) == (0, 0)


TURN = st.tuples(st.lists(st.integers(1, 90), max_size=6), st.integers(1, 9))


@hypothesis.given(
  sessions=st.lists(st.lists(TURN, min_size=1, max_size=3), min_size=1, max_size=6),
  num_pages=st.integers(10, 16),
  publishes=st.sets(st.integers(0, 30), max_size=2),
  releases=st.sets(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=2),
  kv_after_publish=st.sampled_from(["keep", "reprefill"]),
  prefill_chunk=st.sampled_from([0, 2, 7, 40]),  # 0: prompts are read whole
)
def test_whatever_happens_every_turn_ends_once_with_the_tokens_of_its_rollout(
  sessions, num_pages, publishes, releases, kv_after_publish, prefill_chunk
):
  """Few pages, several turns, publishes and releases; the engine checks what is reserved."""
  engine, scheduler = make(
    4, 40, decode_steps=3, kv_after_publish=kv_after_publish, num_pages=num_pages, park_after=1, keep_experts=True,
    prefill_chunk=prefill_chunk,
  )  # fmt: skip
  ids, rows, released, waiting = {}, {}, set(), []

  def start(index, turn):
    new, budget = sessions[index][turn]
    new = [index + 1, *new] if turn == 0 else new
    ids[index] = ids.get(index, []) + new
    last = turn + 1 == len(sessions[index])
    ask = request(index, new, budget, keep_slot=not last)
    scheduler.submit(ask, lambda done: finish(index, turn, done))

  def finish(index, turn, done):
    if isinstance(done, SessionReleasedError):
      return
    if not publishes:
      assert done.token_ids.tolist() == answer(ids[index], index, len(done.token_ids))
    ids[index] += done.token_ids.tolist()
    rows[index] = rows.get(index, 0) + len(done.routed_experts)
    assert rows[index] == len(ids[index]) - 1
    if turn + 1 < len(sessions[index]) and done.finish_reason != "context":
      waiting.append((index, turn + 1))

  for index in range(len(sessions)):
    start(index, 0)
  for tick in range(500):
    if tick in publishes:
      scheduler.publish(None, tick + 1)
    for _, index in [item for item in releases if item[0] == tick and item[1] < len(sessions)]:
      released.add(index)
      scheduler.release(index)
    worked = scheduler.tick()
    now, waiting[:] = waiting.copy(), []
    for index, turn in now:
      if index not in released:
        start(index, turn)
    if not worked and not now and tick > 30:
      break
  stats = scheduler.stats()
  assert not stats["queued_turns"] and not stats["decoding_turns"]

  # Those that wait for another turn give back what they kept.
  for index in range(len(sessions)):
    scheduler.release(index)
  scheduler.tick()
  assert engine.pool.num_free(0) == num_pages and scheduler.stats()["free_slots"] == 4
