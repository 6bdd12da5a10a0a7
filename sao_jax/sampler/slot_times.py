"""The time of a sampler's slots, by what they do."""

from __future__ import annotations

import time
from collections.abc import Callable

SLOT_STATES = ("decoding", "prefilling", "waiting", "free")


class SlotTimes:
  """Slot-seconds in each of `SLOT_STATES`; one thread notes, any may read.

  A slot decodes as long as it holds a turn; it prefills in the round in which the turn begins, which does both; it
  waits while it holds a session whose environment works.
  """

  def __init__(self, num_slots: int, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    # Replaced as a whole, so that a reader never sees half of a change: (since when, slots now, slot-seconds before).
    self._state = clock(), (0, 0, 0, num_slots), (0.0,) * len(SLOT_STATES)

  def note(self, decoding: int, prefilling: int, waiting: int, free: int) -> None:
    """Notes that from now on so many slots are in each state."""
    now = self._clock()
    self._state = now, (decoding, prefilling, waiting, free), self._sums(now)

  def seconds(self) -> dict[str, float]:
    """Returns the sums up to now, as {"decoding_slot_seconds": ...}."""
    return {f"{name}_slot_seconds": total for name, total in zip(SLOT_STATES, self._sums(self._clock()))}

  def _sums(self, now: float) -> tuple[float, ...]:
    since, slots, sums = self._state
    return tuple(total + count * (now - since) for total, count in zip(sums, slots))
