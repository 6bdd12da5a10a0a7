"""Host side of a prefill into pages: the tokens of several slots, one behind the other in the row of their pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from sao_jax.sampler.buckets import smallest_bucket
from sao_jax.sampler.prefill import Extension, Piece, set_fields
from sao_jax.sampler.state import SlotState, idle_rows


@dataclasses.dataclass(frozen=True)
class PagedCall:
  """Pieces that one call writes: for every pool at most `rows`, of at most `length` tokens together."""

  pieces: list[list[Piece]]
  rows: int
  length: int

  @property
  def shape(self) -> tuple[int, ...]:
    """Static sizes of the program."""
    return self.rows, self.length

  def written(self) -> Iterator[tuple[Piece, int, slice]]:
    """Yields every piece that writes tokens, its pool, and where its tokens lie in that row."""
    for pool, pieces in enumerate(self.pieces):
      end = 0
      for piece in pieces:
        yield piece, pool, slice(end, end + piece.count)
        end += piece.count

  def arrays(
    self, num_slots: int, table: Int[np.ndarray, "S p"]
  ) -> tuple[
    Int[np.ndarray, "D R p"], Int[np.ndarray, "D T"], Int[np.ndarray, "D R"], Int[np.ndarray, "D R"], SlotState
  ]:
    """table, token_ids, counts, slots and the new slot fields, as `page_steps.extend` takes them."""
    # Unused rows write no tokens, to a slot out of range.
    shape = (len(self.pieces), self.rows)
    token_ids = np.zeros((shape[0], self.length), np.int32)
    counts, slots = np.zeros(shape, np.int32), np.full(shape, num_slots, np.int32)
    pages = np.zeros((*shape, table.shape[1]), np.int32)
    fields = idle_rows(shape[0] * self.rows)

    for pool, pieces in enumerate(self.pieces):
      end = 0
      for row, piece in enumerate(pieces):
        # The tokens follow those of the rows before; the slot's fields go along.
        slot = piece.extension.slot
        token_ids[pool, end : end + piece.count] = piece.token_ids
        end += piece.count
        counts[pool, row], slots[pool, row], pages[pool, row] = piece.count, slot, table[slot]
        set_fields(fields, pool * self.rows + row, piece)
    return pages, token_ids, counts, slots, fields


def plan_paged_calls(
  extensions: Sequence[Extension], slots_per_pool: int, num_pools: int, lengths: Sequence[int], rows: int
) -> Iterator[PagedCall]:
  """The calls that write all extensions, the pieces of each in order: each call is filled before the next one begins.

  Args:
    extensions: for different slots.
    slots_per_pool: slot s belongs to pool s // slots_per_pool.
    num_pools: the number of pools.
    lengths: padded lengths of a row, ascending.
    rows: sequences of a call and pool, at most.
  """
  queues: list[list[Extension]] = [[] for _ in range(num_pools)]
  for extension in extensions:
    queues[extension.slot // slots_per_pool].append(extension)

  rows_of = [_fill_rows(queue, lengths[-1], rows) for queue in queues]
  for index in range(max(map(len, rows_of))):
    pieces = [rows[index] if index < len(rows) else [] for rows in rows_of]
    longest = max(sum(piece.count for piece in row) for row in pieces)
    yield PagedCall(pieces, rows, smallest_bucket(lengths, longest))


def _fill_rows(extensions: Sequence[Extension], length: int, rows: int) -> list[list[Piece]]:
  """The pieces of one pool, call by call; in a call those without tokens come last."""
  calls: list[list[Piece]] = []
  room = 0
  for extension in extensions:
    total, offset = len(extension.token_ids) - 1, 0
    while True:
      # A piece wants a place in a call, and a token's room if it has tokens.
      if not calls or len(calls[-1]) == rows or (not room and total):
        calls.append([])
        room = length
      count = min(room, total - offset)
      calls[-1].append(Piece(extension, offset, count, last=offset + count == total))
      room, offset = room - count, offset + count
      if offset == total:
        break
  return [sorted(pieces, key=lambda piece: not piece.count) for pieces in calls]
