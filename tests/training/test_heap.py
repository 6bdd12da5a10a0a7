"""A settled heap: collections look at what came later only."""

from __future__ import annotations

import gc
import weakref

import pytest

from sao_jax.training.heap import frozen_heap


class Node:
  """May refer to itself."""


def test_what_existed_is_left_alone_and_what_comes_later_is_collected():
  before = Node()
  with frozen_heap():
    assert gc.get_freeze_count() > 10_000 and len(gc.get_objects()) < gc.get_freeze_count() / 10
    assert not any(one is before for one in gc.get_objects())
    later = Node()
    later.itself = later
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None
  assert gc.get_freeze_count() == 0 and any(one is before for one in gc.get_objects())


def test_an_exception_settles_nothing_for_ever():
  with pytest.raises(ValueError), frozen_heap():
    raise ValueError
  assert gc.get_freeze_count() == 0
