"""Several sources in one order: exact shares, epochs of their own, resumed and divided like any other order."""

from __future__ import annotations

import collections
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.data.mixed_prompts import MixedPrompts, Turns
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import BadPrompt, Prompt, PromptKey
from sao_jax.errors import ConfigError

SIZES, WEIGHTS = {"a": 50, "b": 20, "c": 70}, (3, 2, 1)  # grain shuffles sources of a handful slowly


def prompts_of(name, size):
  return [Prompt(PromptKey(name, number, 0), {"number": number}) for number in range(size)]


def mixed(weights=WEIGHTS, sizes=SIZES):
  return MixedPrompts([prompts_of(name, size) for name, size in sizes.items()], weights)


def keys(iterator, count):
  return [next(iterator).key for _ in range(count)]


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_every_cycle_holds_the_weights_exactly_and_is_never_far_from_them(weights, seed):
  turns = Turns(weights, seed)
  common = math.gcd(*weights)
  assert turns.length == sum(weights) // common
  taken = [0] * len(weights)
  for position in range(4 * turns.length):
    source, turn = turns[position]
    assert turn == taken[source]  # every source's turns are 0, 1, 2, ..., in order
    taken[source] += 1
    shares = [weight * (position + 1) / sum(weights) for weight in weights]
    assert max(abs(share - count) for share, count in zip(shares, taken)) < len(weights)
    if (position + 1) % turns.length == 0:
      assert taken == [weight // common * ((position + 1) // turns.length) for weight in weights]


def test_processes_that_take_every_second_position_meet_all_sources():
  turns = Turns((1, 1), seed=0)
  for process in range(2):
    assert {turns[position][0] for position in range(process, 40, 2)} == {0, 1}


def test_each_source_has_epochs_of_its_own():
  drawn = keys(make_prompt_iterator(mixed(), seed=3), 6 * 70)  # 210 of a, 140 of b, 70 of c
  by_source = {name: [key for key in drawn if key.environment == name] for name in SIZES}
  assert {name: len(found) for name, found in by_source.items()} == {"a": 210, "b": 140, "c": 70}
  orders = {name: set() for name in SIZES}
  for name, size in SIZES.items():
    for epoch in range(len(by_source[name]) // size):
      one = by_source[name][epoch * size : (epoch + 1) * size]
      assert sorted(one) == [(name, number, epoch) for number in range(size)]
      orders[name].add(tuple(key.id for key in one))
  assert [len(orders[name]) for name in SIZES] == [4, 7, 1]  # shuffled anew each time


def test_a_source_that_is_added_leaves_the_orders_of_the_others():
  of_a = lambda found: [key for key in found if key.environment == "a"][:20]
  two = make_prompt_iterator(mixed((3, 2), {"a": 50, "b": 20}), seed=1)
  assert of_a(keys(two, 60)) == of_a(keys(make_prompt_iterator(mixed(), seed=1), 60))


def test_the_order_depends_on_the_seed_alone_and_resumes_exactly():
  iterator = make_prompt_iterator(mixed(), seed=4)
  before = keys(iterator, 17)
  assert before == keys(make_prompt_iterator(mixed(), seed=4), 17) != keys(make_prompt_iterator(mixed(), seed=5), 17)
  state = json.loads(json.dumps(iterator.get_state()))
  resumed = make_prompt_iterator(mixed(), seed=4)
  resumed.set_state(state)
  assert keys(resumed, 40) == keys(iterator, 40)

  # Other weights, or other sizes, are another order.
  for other in (mixed((3, 1, 1)), mixed(sizes=SIZES | {"b": 30})):
    with pytest.raises(ConfigError, match="another order"):
      make_prompt_iterator(other, seed=4).set_state(state)


def test_processes_divide_it_and_another_number_of_them_goes_on():
  all_of_it = keys(make_prompt_iterator(mixed(), seed=2), 60)
  shares = [make_prompt_iterator(mixed(), seed=2, shard=(index, 2)) for index in range(2)]
  first, second = keys(shares[0], 10), keys(shares[1], 7)
  assert first == all_of_it[0:20:2] and second == all_of_it[1:14:2]
  one = make_prompt_iterator(mixed(), seed=2)
  one.set_state({"shares": [share.get_state() for share in shares]})
  assert collections.Counter(first + second + keys(one, 43)) == collections.Counter(all_of_it)


def test_a_mixture_has_no_number_of_epochs_and_a_damaged_item_is_passed_on():
  with pytest.raises(ConfigError, match="epochs"):
    make_prompt_iterator(mixed(), seed=0, epochs=1)

  class Damaged(list):
    def __getitem__(self, index):
      raise BadPrompt("data", f"item {index}", "mend it")

  source = MixedPrompts([prompts_of("a", 2), Damaged([1, 2])], (1, 1))
  iterator = make_prompt_iterator(source, seed=0, shuffle=False)
  outcomes = []
  for _ in range(8):
    try:
      outcomes.append(next(iterator).key.environment)
    except BadPrompt:
      outcomes.append("damaged")
  assert collections.Counter(outcomes) == {"a": 4, "damaged": 4}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_as_a_sequence_it_deals_one_of_each_until_all_are_dealt(sizes):
  sources = [[(source, number) for number in range(size)] for source, size in enumerate(sizes)]
  expected = [source[number] for number in range(max(sizes)) for source in sources if number < len(source)]
  dealt = MixedPrompts(sources, [1] * len(sizes))
  assert [dealt[index] for index in range(len(dealt))] == expected
  with pytest.raises(IndexError):
    dealt[len(expected)]
