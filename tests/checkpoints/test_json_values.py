"""JSON values: what is accepted comes back equal from a checkpoint, everything else is named."""

from __future__ import annotations

import collections
import datetime
import enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.checkpoints.host_state import decode, encode
from sao_jax.episode import BadPrompt, Prompt, PromptKey
from sao_jax.json_values import MAX_DEPTH, unstorable
from sao_jax.rollout.prompt_stream import check_prompt

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@given(VALUES)
def test_what_is_storable_comes_back_equal(value):
  assert unstorable(value) is None
  assert decode(encode({"value": value})) == {"value": value}


@pytest.mark.parametrize("key", ["__array__", "__dict__"])
def test_keys_that_mark_something_in_the_archive_come_back_too(key):
  state = {"data": {key: "array_0", "other": [{key: None}]}, "array": np.arange(3)}
  again = decode(encode(state))
  np.testing.assert_array_equal(again.pop("array"), state.pop("array"))
  assert again == state


def nested(depth):
  value = []
  for _ in range(depth - 1):
    value = [value]
  return value


def cycle():
  value = []
  value.extend([value, value])
  return value


class Kind(enum.IntEnum):
  A = 1


@pytest.mark.parametrize(
  "value, named",
  [
    (datetime.datetime(2026, 1, 2), "value is a datetime"),
    ({"rows": [b"bytes"]}, "value['rows'][0] is a bytes"),
    ({"tags": {"a", "b"}}, "value['tags'] is a set"),
    ([(1, 2)], "value[0] is a tuple, which would come back as a list"),
    ({3: "three"}, "value has the key 3; keys must be text"),
    ({"a": {None: 1}}, "value['a'] has the key None"),
    ([np.float64(1.5)], "value[0] is a float64"),
    ([np.int32(1)], "value[0] is a int32"),
    (np.arange(2), "value is a ndarray"),
    ([float("nan")], "value[0] is nan"),
    ([-float("inf")], "value[0] is -inf"),
    (["half \ud83d"], "value[0] holds half of a surrogate pair"),
    ({"\udc00": 1}, "value has the key"),
    (10**5000, "value is an integer of 16610 bits"),
    (Kind.A, "value is a Kind"),
    (collections.OrderedDict(), "value is a OrderedDict"),
    (nested(MAX_DEPTH + 1), f"deeper than {MAX_DEPTH} levels"),
    (cycle(), f"deeper than {MAX_DEPTH} levels"),
    (1j, "value is a complex"),
  ],
  ids=lambda value: type(value).__name__,  # no text of theirs
)
def test_what_would_not_come_back_is_named_with_its_place(value, named):
  assert named in unstorable(value)


def test_the_deepest_that_is_storable_comes_back():
  assert unstorable(nested(MAX_DEPTH)) is None
  assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)


@pytest.mark.parametrize(
  "key, data, named",
  [
    (PromptKey("game", 3, 0), {"when": datetime.date(2026, 1, 2)}, "('game', 3, 0) cannot be stored: data['when']"),
    (PromptKey("game", 3, 0), ["question"], "data is a list, not a dict"),
    (PromptKey(None, 3, 0), {}, "environment of its key is None"),
    (PromptKey("half \ud83d", 3, 0), {}, "which is no name"),
    (PromptKey("game", "3", 0), {}, "whole numbers"),
    (PromptKey("game", 3, 0.5), {}, "whole numbers"),
  ],
  ids=lambda value: type(value).__name__,
)
def test_a_prompt_is_checked_as_it_comes_out_of_its_source(key, data, named):
  with pytest.raises(BadPrompt) as error:
    check_prompt(Prompt(key, data))
  assert named in error.value.problem and error.value.reason == "prompt_unstorable"
  good = Prompt(PromptKey("game", np.int64(3), 0), {"question": "3 + 4"})
  assert check_prompt(good) is good and PromptKey(*decode(encode([*good.key]))) == good.key
