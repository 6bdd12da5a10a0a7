"""Host side of a prefill: what to write into which slots, cut and grouped into calls of a few static shapes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from sao_jax.errors import ConfigError
from sao_jax.sampler.buckets import smallest_bucket
from sao_jax.sampler.state import MAX_STOP_IDS, SlotState, idle_rows


@dataclasses.dataclass(frozen=True)
class Extension:
  """Tokens for one slot, and the turn that follows them.

  Attributes:
    slot: the slot to write to.
    start: index of the first given token. The slot keeps its cache before this index; start=0 overwrites the slot.
    token_ids: at least one token. The last one becomes the slot's pending token, the others are written.
    rollout_id: names the trajectory for its random numbers.
    random_offset: added to the index of a token to get the index of its random numbers.
    budget: tokens to sample; 0 leaves the slot idle.
    stop_ids: at most MAX_STOP_IDS tokens that end the turn.
    temperature: the temperature of the turn.
  """

  slot: int
  start: int
  token_ids: Sequence[int]
  rollout_id: int
  budget: int
  stop_ids: tuple[int, ...] = ()
  temperature: float = 1.0
  random_offset: int = 0

  def check(self, context_length: int) -> None:
    """Refuses what the cache cannot hold, before anything is written.

    Raises:
      ConfigError: too many tokens or stop ids.
    """
    end = self.start + len(self.token_ids)
    if end + self.budget > context_length:
      raise ConfigError(
        "sampler.context_length",
        f"{end} tokens and {self.budget} to sample do not fit into a cache of {context_length}.",
        "raise it, shorten the prompt or sample fewer tokens.",
      )
    if len(self.stop_ids) > MAX_STOP_IDS:
      raise ConfigError("stop_ids", f"there are {len(self.stop_ids)} of them.", f"use at most {MAX_STOP_IDS}.")


@dataclasses.dataclass(frozen=True)
class Piece:
  """A stretch of an extension, written by one call: `count` tokens from `offset` on; `last` starts the turn."""

  extension: Extension
  offset: int
  count: int
  last: bool

  @property
  def start(self) -> int:
    """Index in the trajectory of the first token written."""
    return self.extension.start + self.offset

  @property
  def token_ids(self) -> Sequence[int]:
    """The tokens to write."""
    return self.extension.token_ids[self.offset : self.offset + self.count]

  def split(self, count: int) -> tuple[Piece, Piece | None]:
    """The first `count` tokens, and what is left."""
    if count >= self.count:
      return self, None
    rest = dataclasses.replace(self, offset=self.offset + count, count=self.count - count)
    return dataclasses.replace(self, count=count, last=False), rest


@dataclasses.dataclass(frozen=True)
class PrefillCall:
  """Pieces that one call writes: at most `rows`, each of at most `length` tokens, reading `window` positions."""

  pieces: list[Piece]
  rows: int
  length: int
  window: int

  @property
  def shape(self) -> tuple[int, ...]:
    """Static sizes of the program."""
    return self.rows, self.length, self.window

  def written(self) -> Iterator[tuple[Piece, int, slice]]:
    """Yields every piece, its row, and where its tokens lie in that row."""
    for row, piece in enumerate(self.pieces):
      yield piece, row, slice(0, piece.count)

  def arrays(
    self, num_slots: int
  ) -> tuple[Int[np.ndarray, "P T"], Int[np.ndarray, " P"], Int[np.ndarray, " P"], SlotState]:
    """token_ids, counts, slots and the new slot fields, as `steps.extend` takes them."""
    # Unused rows write no tokens, to a slot out of range.
    token_ids = np.zeros((self.rows, self.length), np.int32)
    counts = np.zeros((self.rows,), np.int32)
    slots = np.full((self.rows,), num_slots, np.int32)
    fields = idle_rows(self.rows)

    for row, piece in enumerate(self.pieces):
      token_ids[row, : piece.count] = piece.token_ids
      counts[row], slots[row] = piece.count, piece.extension.slot
      set_fields(fields, row, piece)
    return token_ids, counts, slots, fields


def set_fields(fields: SlotState, row: int, piece: Piece) -> None:
  """Writes the slot fields of a piece, and its start as their length; the last piece starts the turn."""
  extension = piece.extension
  fields.lengths[row], fields.pending_token[row] = piece.start, extension.token_ids[-1]
  fields.rollout_id[row], fields.random_offset[row] = extension.rollout_id, extension.random_offset
  fields.active[row], fields.budget[row] = piece.last and extension.budget > 0, extension.budget
  fields.stop_ids[row, : len(extension.stop_ids)] = extension.stop_ids
  fields.temperature[row] = extension.temperature


def whole(extension: Extension) -> Piece:
  """The one piece that writes all of an extension."""
  return Piece(extension, 0, len(extension.token_ids) - 1, last=True)


def cut(extension: Extension, longest: int) -> list[Piece]:
  """The pieces of at most `longest` tokens that write an extension, in order; one even if nothing is to be written."""
  total = len(extension.token_ids) - 1
  offsets = range(0, max(total, 1), longest)
  return [Piece(extension, i, min(longest, total - i), last=i + longest >= total) for i in offsets]


def plan_calls(
  extensions: Sequence[Extension], lengths: Sequence[int], windows: Sequence[int], batches: Sequence[int]
) -> Iterator[PrefillCall]:
  """The calls that write all extensions, the pieces of each in order.

  Args:
    extensions: for different slots.
    lengths: padded lengths, ascending.
    windows: prefix windows, ascending; a piece without a prefix uses 0.
    batches: rows per call, ascending; only a rest smaller than the first one leaves rows empty.
  """
  waiting = [cut(extension, lengths[-1]) for extension in extensions]
  for round_of_pieces in itertools.zip_longest(*waiting):
    groups: dict[tuple[int, int], list[Piece]] = {}
    for piece in filter(None, round_of_pieces):
      window = smallest_bucket(windows, piece.start) if piece.start else 0
      groups.setdefault((smallest_bucket(lengths, piece.count), window), []).append(piece)
    for (length, window), members in groups.items():
      while members:
        rows = next((size for size in reversed(batches) if size <= len(members)), batches[0])
        yield PrefillCall(members[:rows], rows, length, window)
        members = members[rows:]
