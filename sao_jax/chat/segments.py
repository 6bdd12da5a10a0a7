"""Episodes whose context was replaced on the way: several segments, each with a prompt of its own.

A template that rewrites history (drops earlier thinking, say) breaks the prefix that the policy has seen. Tokens
sampled before the rewriting stay in the segment in which they were sampled, and the rewritten history is the next
segment's prompt. So every sampled token is trained once, in the context in which it was sampled; rewards, n and
advantages belong to all segments together, which may lie in different rows of a batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True)
class Segment:
  """One context: a prompt, then actions and observations in the order in which they were appended.

  Attributes:
    token_ids: int32 [T], all tokens of the segment.
    action_mask: bool [T], True on sampled tokens, stop tokens included.
  """

  token_ids: Int[np.ndarray, "T"]
  action_mask: Bool[np.ndarray, "T"]


class SegmentRecorder:
  """Collects an episode's segments id by id."""

  def __init__(self):
    self._pieces: list[list[tuple[np.ndarray, bool]]] = []

  def start(self, prompt_ids: Int[np.ndarray, "n"]) -> None:
    """Opens a segment with its prompt."""
    self._pieces.append([])
    self.append(prompt_ids, sampled=False)

  def append(self, token_ids: Int[np.ndarray, "n"], *, sampled: bool) -> None:
    """Extends the open segment by an action or an observation."""
    if not self._pieces:
      raise ValueError("an episode starts with a prompt")
    self._pieces[-1].append((np.array(token_ids, dtype=np.int32), sampled))

  @property
  def segments(self) -> tuple[Segment, ...]:
    """All segments so far, the open one included."""
    return tuple(
      Segment(
        np.concatenate([ids for ids, _ in pieces]),
        np.concatenate([np.full(len(ids), sampled, dtype=np.bool_) for ids, sampled in pieces]),
      )
      for pieces in self._pieces
    )
