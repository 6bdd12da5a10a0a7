"""The cache as one stretch of full length per slot, and its programs in a few static shapes: fastest on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int

from sao_jax.sampler import buckets, steps
from sao_jax.sampler.caches import empty_cache
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.prefill import Extension, Piece, PrefillCall, plan_calls
from sao_jax.sampler.programs import Sizes
from sao_jax.sampler.sample_loop import DecodeOutputs
from sao_jax.sampler.state import EngineState, empty_state
from sao_jax.sampler.straight import runs_straight, short_window

MIN_ROWS_IN_HALVES = 16  # with fewer rows, the operations of two halves cost more than the positions that are not read


@dataclasses.dataclass(frozen=True)
class DecodeCall:
  """One decode call: the slot of each of its rows, num_slots where unused, and how many positions each may read.

  With a `short` window the first half of the rows may read so many.
  """

  slots: Int[np.ndarray, " R"]
  window: int
  short: int = 0

  @property
  def shape(self) -> tuple[int, ...]:
    """Static sizes of the program."""
    return (len(self.slots), self.window, self.short) if self.short else (len(self.slots), self.window)


class SlotPrograms:
  """See `programs.Programs`. Every slot has its room: it is never short of any."""

  def __init__(self, sizes: Sizes):
    """`sizes` do not change afterwards."""
    self.sizes, config, shards = sizes, sizes.sampler, sizes.layout.shards("slots")
    on_mesh = sizes.layout.mesh is not None

    # Every static shape that a program is compiled for.
    self._windows = buckets.window_buckets(config)
    self._prefixes = buckets.prefix_windows(config)
    self._lengths = buckets.prefill_buckets(config)
    self._prefill_batches = buckets.prefill_batches(config) if shards == 1 else (shards,)
    self._decode_batches = (config.num_slots,) if on_mesh else buckets.decode_batches(config)

  @property
  def decode_batch(self) -> int:
    """Slots per decode call."""
    return self._decode_batches[-1]

  @property
  def reads_prompts(self) -> bool:
    """False: `extend` does, before `decode`."""
    return False

  def empty_state(self) -> EngineState:
    """The state of an engine that holds nothing."""
    model, config = self.sizes.model, self.sizes.sampler
    build = lambda: empty_cache(model, config.num_slots, config.context_length, self.sizes.cache_dtype)
    return empty_state(build, config.num_slots, self.sizes.layout)

  def plan_extend(self, extensions: Sequence[Extension]) -> Iterator[PrefillCall]:
    """The calls that write all extensions."""
    return plan_calls(extensions, self._lengths, self._prefixes, self._prefill_batches)

  def take_pieces(self, waiting: Sequence[Piece]) -> list[Piece]:
    """Nothing: no call of `decode` reads prompts."""
    return []

  def plan_decode(self, lengths: Mapping[int, int], num_steps: int, pieces: Sequence[Piece] = ()) -> DecodeCall:
    """The call that decodes these slots, which hold so many tokens at most; there are no pieces."""
    del num_steps, pieces
    num_slots = self.sizes.sampler.num_slots
    rows = buckets.smallest_bucket(self._decode_batches, len(lengths))
    window = buckets.smallest_bucket(self._windows, max(lengths.values()))
    slots = np.full((rows,), num_slots, np.int32)

    # The shorter half of the rows, and all that are unused, read less where that is worth a program of its own.
    short = self._short_window(rows, window)
    by_length = sorted(lengths, key=lengths.__getitem__)
    if short and (len(lengths) <= rows // 2 or lengths[by_length[len(lengths) - rows // 2 - 1]] <= short):
      slots[rows - len(lengths) :] = by_length
      return DecodeCall(slots, window, short)

    members = np.fromiter(lengths, np.int32, len(lengths))
    slots[members if rows == num_slots else slice(len(members))] = members
    return DecodeCall(slots, window)

  def _short_window(self, rows: int, window: int) -> int:
    """The window of the shorter half of the rows of a call, 0 where all rows have the same."""
    straight = runs_straight(self.sizes.model, self.sizes.layout)
    pays = straight and rows == self._decode_batches[-1] and rows >= MIN_ROWS_IN_HALVES and rows % 2 == 0
    return short_window(self._windows, window) if pays else 0

  def idle_calls(self, prefixes: bool) -> Iterator[PrefillCall | DecodeCall]:
    """A call of every shape, which changes no slot."""
    for rows in self._decode_batches:
      for window in self._windows:
        idle = np.full((rows,), self.sizes.sampler.num_slots, np.int32)
        for short in sorted({0, self._short_window(rows, window)}):
          yield DecodeCall(idle, window, short)
    for window in (0, *(self._prefixes if prefixes else ())):
      for length in self._lengths:
        for rows in self._prefill_batches:
          yield PrefillCall([], rows, length, window)

  def extend(self, weights: Weights, state: EngineState, call: PrefillCall) -> tuple[EngineState, jax.Array | None]:
    """Starts `steps.extend`."""
    return steps.extend(
      weights.params,
      state,
      *call.arrays(self.sizes.sampler.num_slots),
      config=self.sizes.model,
      window=call.window,
      keep_experts=self.sizes.keep_experts,
      layout=self.sizes.layout,
    )

  def decode(
    self, weights: Weights, state: EngineState, call: DecodeCall, num_steps: int
  ) -> tuple[EngineState, DecodeOutputs, None]:
    """Starts `steps.decode`."""
    state, outputs = steps.decode(
      weights.params,
      state,
      weights.key,
      call.slots,
      np.int32(num_steps),
      config=self.sizes.model,
      rule=self.sizes.rule,
      window=call.window,
      short=call.short,
      max_steps=self.sizes.sampler.decode_steps,
      keep_experts=self.sizes.keep_experts,
      layout=self.sizes.layout,
    )
    return state, outputs, None

  def reserve(self, slot: int, length: int) -> bool:
    """True: a slot has room for a whole context."""
    return True

  def release(self, slot: int) -> None:
    """Does nothing: the next sequence overwrites the slot."""

  def num_free_pages(self, slot: int) -> int:
    """0: there are no pages."""
    return 0

  def share_room(self, slot: int, other: int) -> bool:
    """False: what one slot gives up is of no use to another."""
    return False
