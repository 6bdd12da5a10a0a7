"""Prompt iterators: exact resume in the shuffle, epoch boundaries, hosts (case C1)."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.data.prompts import make_prompt_iterator, split_of
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError


def source(length: int) -> list[Prompt]:
  return [Prompt(PromptKey("letters", index, 0), {"text": f"prompt {index}"}) for index in range(length)]


def take(iterator, count: int) -> list[tuple[int, int]]:
  """(id, epoch) of the next prompts."""
  return [(prompt.key.id, prompt.key.epoch) for prompt in itertools.islice(iterator, count)]


def resumed(iterator, **arguments):
  """A new iterator at the other's position, the state having gone through JSON."""
  fresh = make_prompt_iterator(source(8), **arguments)
  fresh.set_state(json.loads(json.dumps(iterator.get_state())))
  return fresh


def test_resume_inside_an_epoch_gives_the_unseen_half_in_the_same_shuffle():
  whole = take(make_prompt_iterator(source(8), seed=3), 16)
  iterator = make_prompt_iterator(source(8), seed=3)
  first = take(iterator, 4)
  rest = take(resumed(iterator, seed=3), 4)
  assert first + rest == whole[:8]
  assert sorted(number for number, _ in first + rest) == list(range(8))


def test_resume_at_the_end_of_an_epoch_gives_the_whole_next_epoch():
  whole = take(make_prompt_iterator(source(8), seed=3), 24)
  iterator = make_prompt_iterator(source(8), seed=3)
  take(iterator, 8)
  following = take(resumed(iterator, seed=3), 8)
  assert following == whole[8:16]
  assert sorted(following) == [(number, 1) for number in range(8)]
  last = make_prompt_iterator(source(8), seed=3, epochs=1)
  take(last, 8)
  assert take(resumed(last, seed=3, epochs=1), 1) == []


@settings(max_examples=10)  # building a grain pipeline takes a while
@given(st.integers(0, 40), st.integers(1, 20), st.integers(0, 2**31 - 1))
def test_resume_anywhere(position: int, count: int, seed: int):
  iterator = make_prompt_iterator(source(8), seed=seed)
  take(iterator, position)
  follower = resumed(iterator, seed=seed)
  assert take(follower, count) == take(iterator, count)


def test_a_state_can_be_taken_without_disturbing_the_order():
  plain, watched = make_prompt_iterator(source(8), seed=1), make_prompt_iterator(source(8), seed=1)
  seen = []
  for prompt in itertools.islice(watched, 20):
    watched.get_state()
    seen.append((prompt.key.id, prompt.key.epoch))
  assert seen == take(plain, 20)


def test_every_epoch_is_its_own_permutation():
  epochs = [take(iterator, 8) for iterator in [make_prompt_iterator(source(8), seed=0)] for _ in range(4)]
  for number, epoch in enumerate(epochs):
    assert sorted(epoch) == [(index, number) for index in range(8)]
  orders = {tuple(index for index, _ in epoch) for epoch in epochs}
  assert len(orders) == 4
  assert take(make_prompt_iterator(source(8), seed=1), 8) != epochs[0]


def test_without_shuffle_the_order_is_the_sources():
  iterator = make_prompt_iterator(source(3), seed=0, shuffle=False, epochs=2)
  assert take(iterator, 99) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("length, hosts", [(8, 2), (7, 3), (5, 4), (2, 3)])
def test_hosts_together_see_every_prompt_once_per_epoch(length: int, hosts: int):
  shards = [make_prompt_iterator(source(length), seed=5, shard=(host, hosts)) for host in range(hosts)]
  rounds = 2 * length  # every host draws 2 * length prompts: 2 * hosts epochs in all
  seen = [key for shard in shards for key in take(shard, rounds)]
  assert sorted(seen) == sorted((index, epoch) for index in range(length) for epoch in range(2 * hosts))


def test_one_host_sees_what_the_global_order_gives_it():
  order = take(make_prompt_iterator(source(8), seed=5), 24)
  assert take(make_prompt_iterator(source(8), seed=5, shard=(1, 3)), 8) == order[1::3]
  iterator = make_prompt_iterator(source(8), seed=5, shard=(1, 3))
  take(iterator, 3)
  assert take(resumed(iterator, seed=5, shard=(1, 3)), 5) == order[1::3][3:]


@pytest.mark.parametrize(
  "other",
  [{"seed": 4}, {"seed": 3, "shuffle": False}, {"seed": 3, "shard": (0, 2)}, {"seed": 3, "epochs": 2}],
)
def test_a_state_of_another_order_is_refused(other):
  state = make_prompt_iterator(source(8), seed=3).get_state()
  with pytest.raises(ConfigError, match="another order of prompts") as caught:
    make_prompt_iterator(source(8), **other).set_state(state)
  assert caught.value.field == "prompts"


def test_a_state_of_another_length_is_refused_by_name():
  state = make_prompt_iterator(source(9), seed=3).get_state()
  with pytest.raises(ConfigError, match="length 9 -> 8"):
    make_prompt_iterator(source(8), seed=3).set_state(state)


@pytest.mark.parametrize(
  "length, arguments, field",
  [(0, {}, "prompts"), (8, {"shard": (2, 2)}, "shard"), (8, {"shard": (0, 0)}, "shard"), (8, {"epochs": 0}, "epochs")],
)
def test_bad_input_is_refused(length, arguments, field):
  with pytest.raises(ConfigError) as caught:
    make_prompt_iterator(source(length), seed=0, **arguments)
  assert caught.value.field == field


def test_split_is_a_fixed_hash_of_the_text():
  texts = [f"question {number}" for number in range(5000)]
  heldout = [text for text in texts if split_of(text) == "heldout"]
  assert len(heldout) / len(texts) == pytest.approx(0.1, abs=0.02)
  # From sha256 of the text, so the same in every process, version and seed.
  assert [number for number in range(40) if split_of(str(number)) == "heldout"] == [9, 39]


@pytest.mark.parametrize(
  "prompts, problem",
  [
    ([{"question": "1+1"}], "prompts\\(\\) holds a dict, not a Prompt"),
    (["1+1"], "holds a str"),
    ((prompt for prompt in source(2)), "returned a generator, which has no length"),
    (None, "returned a NoneType"),
    ([], "The source of prompts is empty"),
  ],
)
def test_what_is_no_source_of_prompts_is_refused_by_name(prompts, problem):
  with pytest.raises(ConfigError, match=problem) as error:
    make_prompt_iterator(prompts, seed=0)
  assert error.value.field in ("environment", "prompts") and error.value.remedy


@pytest.mark.parametrize("hosts", [(2, 3, 1), (1, 4, 2), (3, 3), (2, 1, 2)])
def test_every_prompt_is_taken_once_however_often_the_number_of_processes_changes(hosts):
  """Processes take their prompts at a pace of their own; the state goes through JSON from one number to the next."""
  make = lambda index, count: make_prompt_iterator(source(7), seed=5, shard=(index, count))
  seen, states = [], None
  for round_, count in enumerate(hosts):
    iterators = [make(index, count) for index in range(count)]
    for iterator in iterators:
      if states is not None:
        iterator.set_state({"shares": states})
    for index, iterator in enumerate(iterators):
      seen += take(iterator, 3 + 4 * ((index + round_) % 3))
    states = json.loads(json.dumps([iterator.get_state() for iterator in iterators]))

    # A process that only starts again is where it was.
    again = make(0, count)
    again.set_state(states[0])
    assert take(again, 9) == take(iterators[0], 9)

  # Nothing twice, and once the slow ones have caught up nothing is missing.
  assert len(set(seen)) == len(seen)
  iterator = make(0, 1)
  iterator.set_state({"shares": states})
  seen += take(iterator, 40)
  order = take(make(0, 1), len(seen))
  assert sorted(seen) == sorted(order)
