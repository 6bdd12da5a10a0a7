"""Totals of a scheduler."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Counters:
  """Totals of a scheduler since its start.

  Attributes:
    dispatches: decode calls.
    steps: decode steps in which at least one slot emitted a token.
    sampled_tokens: tokens emitted.
    prefilled_tokens: tokens written by prefills.
    parked: sessions that lost their slot while their environment worked.
    preempted: running turns that gave their slot up for lack of pages; they go on when there are some.
    reprefilled: turns whose cache was recomputed after a publish.
    publishes: sets of parameters taken over.
  """

  dispatches: int = 0
  steps: int = 0
  sampled_tokens: int = 0
  prefilled_tokens: int = 0
  parked: int = 0
  preempted: int = 0
  reprefilled: int = 0
  publishes: int = 0
