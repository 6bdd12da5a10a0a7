"""The cache in pages, and its programs: a prefill of each length, and one decode, whatever the slots hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int

from sao_jax.errors import ConfigError
from sao_jax.sampler import buckets, page_steps
from sao_jax.sampler.caches import empty_pages
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.page_pool import PagePool
from sao_jax.sampler.page_prefill import PagedCall, plan_paged_calls
from sao_jax.sampler.prefill import Extension
from sao_jax.sampler.programs import Sizes
from sao_jax.sampler.sample_loop import DecodeOutputs
from sao_jax.sampler.state import EngineState, empty_state


@dataclasses.dataclass(frozen=True)
class PagedDecodeCall:
  """One decode call over all slots: the slot of each row, num_slots where it is left as it is."""

  slots: Int[np.ndarray, " S"]

  @property
  def shape(self) -> tuple[int, ...]:
    """Static sizes of the program."""
    return (len(self.slots),)


class PagePrograms:
  """See `programs.Programs`. The slots of each part of the mesh share a pool of pages."""

  def __init__(self, sizes: Sizes):
    """`sizes` do not change afterwards.

    Raises:
      ConfigError: the pages do not hold one context, or do not split over the mesh.
    """
    self.sizes, config = sizes, sizes.sampler
    self._pools = sizes.layout.shards("slots")

    # As many pages in each pool, which hold at least one context.
    self._pages_per_slot = -(-config.context_length // config.page_size)
    self._num_pages, left = divmod(config.num_pages or config.num_slots * self._pages_per_slot, self._pools)
    if left:
      raise ConfigError(
        "sampler.num_pages",
        f"{config.num_pages} pages cannot be split over {self._pools} devices of the mesh's data axes.",
        f"use a multiple of {self._pools}, or 0: as many as all slots need.",
      )
    if self._num_pages < self._pages_per_slot:
      raise ConfigError(
        "sampler.num_pages",
        f"{config.num_pages} pages hold no context of {config.context_length} tokens in each of {self._pools} parts.",
        f"use at least {self._pools * self._pages_per_slot}, or 0: as many as all slots need.",
      )

    # The pools on the host, and the sizes of a prefill.
    self._pool = PagePool(config.num_slots, self._pages_per_slot, self._num_pages, config.page_size, self._pools)
    self._lengths = buckets.prefill_buckets(config)
    self._rows = min(config.prefill_batch, config.num_slots // self._pools)

  @property
  def decode_batch(self) -> int:
    """Slots per decode call."""
    return self.sizes.sampler.num_slots

  def empty_state(self) -> EngineState:
    """The state of an engine that holds nothing."""
    sizes = self.sizes
    build = lambda: empty_pages(sizes.model, self._num_pages, sizes.sampler.page_size, sizes.cache_dtype, sizes.layout)
    return empty_state(build, sizes.sampler.num_slots, sizes.layout)

  def plan_extend(self, extensions: Sequence[Extension]) -> Iterator[PagedCall]:
    """The calls that write all extensions, for which their slots get pages.

    Raises:
      RuntimeError: there are none left; `reserve` tells beforehand.
    """
    for extension in extensions:
      self._need(extension.slot, extension.start + len(extension.token_ids) - 1)
    return plan_paged_calls(extensions, self._pool.slots_per_part, self._pools, self._lengths, self._rows)

  def plan_decode(self, lengths: Mapping[int, int], num_steps: int) -> PagedDecodeCall:
    """The call that decodes these slots, which hold so many tokens at most, and get pages for `num_steps` more.

    Raises:
      RuntimeError: as for `plan_extend`.
    """
    # All slots are rows of the one program; those that are not named stay as they are.
    num_slots, capacity = self.sizes.sampler.num_slots, self.sizes.sampler.context_length
    for slot, length in lengths.items():
      self._need(slot, min(length + num_steps, capacity))
    slots = np.full((num_slots,), num_slots, np.int32)
    members = np.fromiter(lengths, np.int32, len(lengths))
    slots[members] = members
    return PagedDecodeCall(slots)

  def idle_calls(self, prefixes: bool) -> Iterator[PagedCall | PagedDecodeCall]:
    """A call of every shape, which changes no slot."""
    del prefixes
    yield PagedDecodeCall(np.full((self.decode_batch,), self.decode_batch, np.int32))
    for length in self._lengths:
      yield PagedCall([[] for _ in range(self._pools)], self._rows, length)

  def extend(self, weights: Weights, state: EngineState, call: PagedCall) -> tuple[EngineState, jax.Array | None]:
    """Starts `page_steps.extend`."""
    sizes = self.sizes
    return page_steps.extend(
      weights.params,
      state,
      *call.arrays(sizes.sampler.num_slots, self._pool.table),
      config=sizes.model,
      capacity=sizes.sampler.context_length,
      keep_experts=sizes.keep_experts,
      layout=sizes.layout,
    )

  def decode(
    self, weights: Weights, state: EngineState, call: PagedDecodeCall, num_steps: int
  ) -> tuple[EngineState, DecodeOutputs]:
    """Starts `page_steps.decode`."""
    sizes = self.sizes
    return page_steps.decode(
      weights.params,
      state,
      self._pool.table.copy(),  # the host goes on to change it while the call runs
      weights.key,
      call.slots < sizes.sampler.num_slots,
      np.int32(num_steps),
      config=sizes.model,
      rule=sizes.rule,
      max_steps=sizes.sampler.decode_steps,
      capacity=sizes.sampler.context_length,
      keep_experts=sizes.keep_experts,
      layout=sizes.layout,
    )

  def reserve(self, slot: int, length: int) -> bool:
    """Gives the slot pages for `length` tokens; False if too few are free."""
    return self._pool.reserve(slot, length)

  def release(self, slot: int) -> None:
    """Takes the slot's pages back."""
    self._pool.release(slot)

  def num_free_pages(self, slot: int) -> int:
    """Free pages of the slot's pool."""
    return self._pool.num_free(slot)

  def share_room(self, slot: int, other: int) -> bool:
    """True if both take their pages from one pool."""
    return self._pool.part(slot) == self._pool.part(other)

  def _need(self, slot: int, length: int) -> None:
    if not self._pool.reserve(slot, length):
      raise RuntimeError(f"no pages for the {length} tokens of slot {slot}: nobody has reserved them")
