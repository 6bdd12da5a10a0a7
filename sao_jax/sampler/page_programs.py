"""The cache in pages, and its program: whatever the slots hold, it decodes them, and reads a chunk of their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.errors import ConfigError
from sao_jax.sampler import page_steps
from sao_jax.sampler.caches import empty_pages
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.kernel_limits import check_kernel
from sao_jax.sampler.page_batch import page_width
from sao_jax.sampler.page_call import PagedCall, prompt_arrays, take_pieces
from sao_jax.sampler.page_pool import PagePool
from sao_jax.sampler.prefill import Piece
from sao_jax.sampler.programs import Sizes
from sao_jax.sampler.sample_loop import DecodeOutputs
from sao_jax.sampler.state import EngineState, empty_state


class PagePrograms:
  """See `programs.Programs`. The slots of each part of the mesh share a pool of pages."""

  def __init__(self, sizes: Sizes):
    """`sizes` do not change afterwards.

    Raises:
      ConfigError: the pages do not hold one context, do not split over the mesh, or are none for a TPU's kernel.
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
    self._pool = PagePool(config.num_slots, self._pages_per_slot, self._num_pages, config.page_size, self._pools)
    self._check_kernel()

  def _check_kernel(self) -> None:
    # Latents are read without it.
    sizes, layout = self.sizes, self.sizes.layout
    if layout.platform != "tpu" or sizes.model.kv_lora_rank:
      return
    refused = check_kernel(
      sizes.sampler.page_size,
      self._pages_per_slot,
      self._pool.slots_per_part,
      kv_heads=sizes.model.num_kv_heads // layout.shards("kv_heads"),
      width=page_width(sizes.model.head_dim, layout),
      itemsize=jnp.dtype(sizes.cache_dtype).itemsize,
    )
    if refused is not None:
      raise refused

  @property
  def decode_batch(self) -> int:
    """Slots per call."""
    return self.sizes.sampler.num_slots

  @property
  def reads_prompts(self) -> bool:
    """True: calls of `decode` read prompts."""
    return True

  def empty_state(self) -> EngineState:
    """The state of an engine that holds nothing."""
    sizes = self.sizes
    build = lambda: empty_pages(sizes.model, self._num_pages, sizes.sampler.page_size, sizes.cache_dtype, sizes.layout)
    return empty_state(build, sizes.sampler.num_slots, sizes.layout)

  def take_pieces(self, waiting: Sequence[Piece]) -> list[Piece]:
    """Chooses what the next call reads of prompts, given the rest of each."""
    return take_pieces(waiting, self._pool.slots_per_part, self.sizes.sampler.prefill_chunk)

  def plan_decode(self, lengths: Mapping[int, int], num_steps: int, pieces: Sequence[Piece] = ()) -> PagedCall:
    """The call that decodes these slots, which hold so many tokens at most, and get pages for `num_steps` more.

    It reads `pieces` first, which `take_pieces` has chosen.

    Raises:
      RuntimeError: there are no pages left; `reserve` tells beforehand.
    """
    num_slots, capacity = self.sizes.sampler.num_slots, self.sizes.sampler.context_length
    for piece in pieces:
      self._need(piece.extension.slot, piece.start + piece.count)
    for slot, length in lengths.items():
      self._need(slot, min(length + num_steps, capacity))

    # All slots are rows of the one program; those that are not named stay as they are.
    chosen = np.zeros((num_slots,), np.bool_)
    chosen[[*lengths, *(piece.extension.slot for piece in pieces)]] = True
    return self._call(chosen, tuple(sorted(pieces, key=lambda piece: piece.extension.slot)), bool(pieces))

  def idle_calls(self, prefixes: bool) -> Iterator[PagedCall]:
    """A call of every shape, which changes no slot."""
    del prefixes
    nothing = np.zeros((self.sizes.sampler.num_slots,), np.bool_)
    yield self._call(nothing, (), reads_prompts=False)
    yield self._call(nothing, (), reads_prompts=True)

  def _call(self, chosen: np.ndarray, pieces: tuple[Piece, ...], reads_prompts: bool) -> PagedCall:
    config, prompts = self.sizes.sampler, None
    if reads_prompts:
      prompts = prompt_arrays(pieces, config.num_slots, self._pools, config.prefill_chunk)
    return PagedCall(chosen, self._pool.table.copy(), pieces, prompts)  # the host goes on to change the table

  def decode(
    self, weights: Weights, state: EngineState, call: PagedCall, num_steps: int
  ) -> tuple[EngineState, DecodeOutputs, jax.Array | None]:
    """Starts `page_steps.dispatch`."""
    sizes = self.sizes
    return page_steps.dispatch(
      weights.params,
      state,
      call.table,
      weights.key,
      call.chosen,
      np.int32(num_steps),
      call.prompts,
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
