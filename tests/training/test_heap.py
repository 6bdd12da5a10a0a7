"""A settled heap: collections look at what is young only, until everything is looked at again."""

from __future__ import annotations

import gc
import weakref

import pytest

from sao_jax.training.heap import frozen_heap


class Node:
  """May refer to itself."""


class Collections:
  """How many objects each full collection had to look at."""

  def __init__(self):
    self.looked_at = []

  def __call__(self, phase, info):
    if phase == "start" and info["generation"] == 2:
      self.looked_at.append(len(gc.get_objects()))


@pytest.fixture(autouse=True)
def as_often_as_python_does():
  """The suite's collections are rarer."""
  thresholds = gc.get_threshold()
  gc.set_threshold(700, 10, 10)
  yield
  gc.set_threshold(*thresholds)


@pytest.fixture
def collections():
  collections = Collections()
  yield collections
  gc.callbacks.remove(collections)


def lost() -> weakref.ref:
  """An object that only a collection frees; it lives until the next one has passed."""
  node = Node()
  node.itself = node
  gc.collect(1)
  return weakref.ref(node)


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
  callbacks = list(gc.callbacks)
  with pytest.raises(ValueError), frozen_heap():
    raise ValueError
  assert gc.get_freeze_count() == 0 and gc.callbacks == callbacks


def test_full_collections_do_not_walk_what_has_grown_old(collections):
  with frozen_heap():
    gc.callbacks.append(collections)
    old = [[] for _ in range(50_000)]  # many collections of the young pass meanwhile
    gc.collect()
    young = collections.looked_at[-1]
  assert len(old) == 50_000 and young < 15_000  # those of the two youngest generations, and what they refer to


def test_cycles_that_were_hidden_are_freed_when_time_has_passed_or_memory_has_grown():
  with frozen_heap():
    kept = lost()
    gc.collect()
    assert kept() is not None
  gc.collect()
  assert kept() is None

  for now in ({"seconds": 0.0}, {"growth": 0.0}):
    with frozen_heap(**now):
      freed = lost()
      gc.collect()
      assert freed() is None


def test_memory_stays_bounded_where_all_that_is_lost_was_hidden():
  """Each piece lives through a collection, is hidden by it, and then refers to itself alone."""
  alive = []
  with frozen_heap(seconds=0.0):
    for _ in range(6):
      alive.append(lost())
      gc.collect()
    assert sum(node() is not None for node in alive) <= 1
