"""The suite stays far from the number of memory maps that Linux allows a process."""

from __future__ import annotations

import mmap

import jax
import pytest
from toys import memory_maps

pytestmark = pytest.mark.skipif(not memory_maps.MAPS.exists(), reason="this system does not list memory maps")


def test_maps_are_counted():
  before = memory_maps.count()
  # Of different rights side by side, since the kernel joins neighbours that are alike.
  held = [mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | (mmap.PROT_WRITE if i % 2 else 0)) for i in range(100)]
  assert memory_maps.count() >= before + 90
  for one in held:
    one.close()
  assert memory_maps.count() <= before + 10


@pytest.fixture
def released(monkeypatch):
  """Records that programs were given back, and keeps them: other tests of this process use them."""
  calls = []
  monkeypatch.setattr(jax, "clear_caches", lambda: calls.append(None))
  return calls


def test_programs_stay_until_there_are_many(released):
  assert not memory_maps.release("a module", beyond=memory_maps.count() + 1000)
  assert not released
  assert memory_maps.release("a module", beyond=1)
  assert len(released) == 1


def test_a_module_that_comes_near_the_limit_is_named(released):
  with pytest.raises(memory_maps.TooManyMaps, match=r"After test_mine.*share them between its tests"):
    memory_maps.release("test_mine", beyond=1, most=2)
  assert len(released) == 1


def test_the_bounds_leave_room_below_the_limit_of_linux():
  # A module starts with at most the first and is stopped beyond the second: a quarter of the limit stays free.
  assert memory_maps.RELEASED_BEYOND < memory_maps.MOST < 0.75 * 65_530
