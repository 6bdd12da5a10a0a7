"""The pages of the cache, on the host: which slot has which, and which are free."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


class PagePool:
  """As many pages for every part of the slots; a slot takes them as its sequence grows and gives all back at its end.

  Part d has the slots d · S/D ... (d + 1) · S/D - 1, and numbers its pages from 0.

  >>> pool = PagePool(num_slots=2, pages_per_slot=3, num_pages=4, page_size=8)
  >>> pool.reserve(0, 17), pool.reserve(1, 9), pool.reserve(1, 8)
  (True, False, True)
  >>> pool.num_free(0), pool.table[0].tolist()
  (0, [0, 1, 2])
  >>> pool.release(0)
  >>> pool.reserve(1, 9), pool.num_free(0)
  (True, 2)
  """

  def __init__(self, num_slots: int, pages_per_slot: int, num_pages: int, page_size: int, parts: int = 1):
    """`num_pages` of each part hold at least one sequence of full length: `num_pages` ≥ `pages_per_slot`."""
    if num_pages < pages_per_slot:
      raise ValueError(f"{num_pages} pages do not hold one sequence of {pages_per_slot}")
    self.slots_per_part, self._page_size = num_slots // parts, page_size
    self._free = [list(range(num_pages))[::-1] for _ in range(parts)]
    self._held = np.zeros((num_slots,), np.int32)
    self.table: Int[np.ndarray, "S p"] = np.zeros((num_slots, pages_per_slot), np.int32)

  def reserve(self, slot: int, length: int) -> bool:
    """Makes sure that the slot has pages for `length` tokens; False, and nothing changes, if too few are free."""
    held, needed = int(self._held[slot]), -(-length // self._page_size)
    free = self._free[self.part(slot)]
    if needed - held > len(free):
      return False
    for index in range(held, needed):
      self.table[slot, index] = free.pop()
    self._held[slot] = max(held, needed)
    return True

  def release(self, slot: int) -> None:
    """Takes all pages of the slot back; calls under way still write to them, before any later call does."""
    held = self.table[slot, : self._held[slot]]
    self._free[self.part(slot)] += held[::-1].tolist()
    self._held[slot] = 0
    self.table[slot] = 0

  def num_free(self, slot: int) -> int:
    """The number of free pages in the slot's part."""
    return len(self._free[self.part(slot)])

  def part(self, slot: int) -> int:
    """The part that the slot belongs to."""
    return slot // self.slots_per_part
