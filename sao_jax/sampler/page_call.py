"""Host side of a call over pages: which slots decode, and the prompts' tokens that are read along with theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from sao_jax.sampler.page_steps import Prompts
from sao_jax.sampler.prefill import Piece, set_fields
from sao_jax.sampler.state import idle_rows


@dataclasses.dataclass(frozen=True)
class PagedCall:
  """One call over all S slots.

  Attributes:
    chosen: the slots that it decodes or reads a prompt for; the others stay as they are.
    table: the pages of every slot.
    pieces: of prompts, in the order of their slots.
    prompts: their tokens as `page_steps.dispatch` takes them; None for the program that reads none.
  """

  chosen: Bool[np.ndarray, " S"]
  table: Int[np.ndarray, "S p"]
  pieces: tuple[Piece, ...] = ()
  prompts: Prompts | None = None

  @property
  def slots(self) -> Int[np.ndarray, " S"]:
    """The slot of each row; S where it is left as it is."""
    return np.where(self.chosen, np.arange(len(self.chosen), dtype=np.int32), len(self.chosen)).astype(np.int32)

  @property
  def shape(self) -> tuple[int, ...]:
    """Static sizes of the program."""
    num_slots = len(self.chosen)
    return (num_slots,) if self.prompts is None else (num_slots, self.prompts.token_ids.shape[1])

  def written(self) -> Iterator[tuple[Piece, int, slice]]:
    """Yields every piece, its pool, and where its tokens lie among those of the pool's first step."""
    if self.prompts is None:
      return
    # As `page_batch.mixed_batch` lays them out: a slot without a prompt takes one place.
    pools, num_slots = self.prompts.token_ids.shape[0], len(self.chosen)
    taken = np.maximum(self.prompts.counts + (self.prompts.given & self.prompts.fields.active), 1).reshape(pools, -1)
    begins = (np.cumsum(taken, axis=1) - taken).reshape(-1)
    for piece in self.pieces:
      slot = piece.extension.slot
      yield piece, slot * pools // num_slots, slice(begins[slot], begins[slot] + piece.count)


def take_pieces(waiting: Sequence[Piece], slots_per_pool: int, chunk: int) -> list[Piece]:
  """Chooses what one call reads of prompts: at most `chunk` tokens of those in each pool, of the first ones first.

  A prompt without tokens always gets its place; one for which there is no room waits.

  Args:
    waiting: all that is left of each prompt.
    slots_per_pool: slot s belongs to pool s // slots_per_pool.
    chunk: tokens of each pool.
  """
  taken, room = [], {}
  for rest in waiting:
    pool = rest.extension.slot // slots_per_pool
    left = room.get(pool, chunk)
    if left or not rest.count:
      piece, _ = rest.split(left)
      taken.append(piece)
      room[pool] = left - piece.count
  return taken


def prompt_arrays(pieces: Sequence[Piece], num_slots: int, num_pools: int, chunk: int) -> Prompts:
  """The tokens and the slots' fields of some pieces in the order of their slots, on the host."""
  token_ids, ends = np.zeros((num_pools, chunk), np.int32), [0] * num_pools
  counts, given = np.zeros((num_slots,), np.int32), np.zeros((num_slots,), np.bool_)
  fields = idle_rows(num_slots)
  for piece in pieces:
    # The tokens follow those of the slots before, in the row of the pool.
    slot = piece.extension.slot
    pool = slot * num_pools // num_slots
    token_ids[pool, ends[pool] : ends[pool] + piece.count] = piece.token_ids
    ends[pool] += piece.count
    counts[slot], given[slot] = piece.count, True
    set_fields(fields, slot, piece)
  return Prompts(token_ids, counts, given, fields)
