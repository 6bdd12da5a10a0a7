"""A run that goes on with another number of processes: every rollout and prompt is somewhere, and only there."""

from __future__ import annotations

import collections
import itertools
import time

import pytest
from toys.rollout_fakes import FakeSampler, Running, make_loop, train

from sao_jax.checkpoints.host_state import decode, encode
from sao_jax.rollout.outcomes import Place
from sao_jax.rollout.resharing import reshare_rollouts


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("saved, now", [(2, 3), (3, 1), (2, 2)])
def test_rollouts_are_dealt_out_whole_and_counters_go_on(group_size, saved, now):
  states = []
  for process in range(saved):
    # Some rollouts have finished, and some hang.
    sampler = FakeSampler(delay=lambda rollout_id: 0.0 if rollout_id < 8 else 3600.0)
    loop = make_loop(sampler=sampler, group_size=group_size)
    with Running(loop):
      train(loop, sampler, 1)
      deadline = time.monotonic() + 20
      while loop.ledger.count(Place.IN_FLIGHT) != 8:
        assert time.monotonic() < deadline
        time.sleep(0.001)
      state, arrays = loop.state_dict()
    state["intake"]["prompts"] = process
    states.append(tuple(decode(encode([state, arrays]))))

  shares = [reshare_rollouts(states, index, now) for index in range(now)]
  assert all(state["intake"]["prompts"] == {"shares": list(range(saved))} for state, _ in shares)

  # Every trajectory and every unfinished prompt, once.
  def contents(states):
    finished = [tuple(record["key"]) for state, _ in states for record in state["trajectories"]]
    unfinished = [tuple(entry[1]) for state, _ in states for entry in state["intake"]["unfinished"]]
    return collections.Counter(finished), collections.Counter(unfinished)

  assert contents(shares) == contents(states)
  sizes = [len(state["intake"]["unfinished"]) // group_size for state, _ in shares]
  assert max(sizes) - min(sizes) <= 2

  # They can be loaded, and the counters of all are those of before.
  loops = []
  for state, arrays in shares:
    state["intake"]["prompts"] = states[0][0]["intake"]["prompts"]
    loop = make_loop(sampler=FakeSampler(version=1), group_size=group_size)
    loop._prompts.set_state = lambda state: None
    loop.load_state_dict(*decode(encode([state, arrays])))
    loops.append(loop)
  total = lambda name, counters: sum(each[name] for each in counters)
  before = [state["buffer"]["admission"] for state, _ in states]
  after = [loop.ledger.counters() for loop in loops]
  assert total("submitted", after) == total("submitted", before)
  assert total("trained", after) == sum(each["outcomes"].get("trained", 0) for each in before)
  assert total("in_flight", after) == total("in_flight", before)

  # Numbers that stand for random numbers are not used again.
  used = {number for state, _ in states for number in range(state["intake"]["next_rollout_id"])}
  numbers = [list(loop.ledger.in_flight()) + list(loop.ledger.buffered()) for loop in loops]
  assert not used & set(itertools.chain(*numbers))
  assert len(set(itertools.chain(*numbers))) == sum(map(len, numbers))
