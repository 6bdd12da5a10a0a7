"""The tokens of one call over a cache in pages: where they are written, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from sao_jax.parallel.layout import Layout

NOWHERE = 2**30  # a page that no pool has: what is written there is dropped
LANES = 128  # of a TPU's registers: arrays of another width are laid out across, and copied before a program uses them


@flax.struct.dataclass
class PageBatch:
  """B rows of T tokens, of R sequences in each of D pools. Flattened, the tokens of a pool's rows are its queries.

  A pool belongs to the devices that hold a part of the slots, and page numbers count within a pool.

  Attributes:
    pages: int32, the page of every token; `NOWHERE` for padding.
    offsets: int32, its position in that page.
    kv_lens: int32, positions of every sequence, with those of this call.
    page_indices: int32, the pages of every sequence.
    cu_q_lens: int32, cumulative numbers of tokens of every pool.
    num_seqs: int32, the number of sequences of every pool, at least 1: the kernel always reads the first one.
  """

  pages: Int[Array, "B T"]
  offsets: Int[Array, "B T"]
  kv_lens: Int[Array, " DR"]
  page_indices: Int[Array, "DR p"]
  cu_q_lens: Int[Array, " DR1"]
  num_seqs: Int[Array, " D"]

  def sequences(self, first_page: Int[Array, ""], num_pages: int) -> dict[str, jax.Array]:
    """The arguments of `ragged_paged_attention` in one pool, for a layer whose pages begin at `first_page`."""
    tables = jnp.clip(self.page_indices, 0, num_pages - 1) + first_page
    return {
      "kv_lens": self.kv_lens,
      "page_indices": tables,
      "cu_q_lens": self.cu_q_lens,
      "num_seqs": self.num_seqs,
    }


def page_width(width: int, layout: Layout) -> int:
  """The width of pages for vectors of `width` numbers: on a TPU the next multiple of its lanes."""
  return width + -width % LANES if layout.platform == "tpu" else width


def widen(x: Float[Array, "... w"], width: int) -> Float[Array, "... v"]:
  """`x` with zeros behind its numbers, which change no product."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def flat(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "N ..."]:
  """The tokens of a pool, one behind the other."""
  return x.reshape(-1, *x.shape[2:])


def write_tokens(
  pages: Shaped[Array, "P c ..."],
  new: Shaped[Array, "N ..."],
  batch: PageBatch,
  first_page: Int[Array, ""],
  num_pages: int,
) -> Shaped[Array, "P c ..."]:
  """Writes what a layer keeps of every token of a pool to its place: one scatter, since no two have the same."""
  new = widen(new, pages.shape[-1])
  page = jnp.where(batch.pages < num_pages, batch.pages + first_page, NOWHERE).reshape(-1)
  return pages.at[page, batch.offsets.reshape(-1)].set(new.astype(pages.dtype), mode="drop")


def decode_batch(
  lengths: Int[Array, " S"], active: Bool[Array, " S"], table: Int[Array, "S p"], page_size: int, layout: Layout
) -> PageBatch:
  """One token of every slot, behind `lengths` others. An idle slot writes nothing, and reads one position."""
  pools = layout.shards("slots")
  page = jnp.take_along_axis(table, (lengths // page_size)[:, None], axis=1)
  return PageBatch(
    pages=jnp.where(active[:, None], page, NOWHERE),
    offsets=(lengths % page_size)[:, None],
    kv_lens=jnp.where(active, lengths + 1, 1),
    page_indices=table,
    cu_q_lens=jnp.tile(jnp.arange(lengths.shape[0] // pools + 1, dtype=jnp.int32), pools),
    num_seqs=jnp.full((pools,), lengths.shape[0] // pools, jnp.int32),
  )


class FlatTokens(NamedTuple):
  """The tokens of a call that also reads prompts, those of the R slots of a pool one behind the other in its row.

  A slot has its prompt's tokens, then its pending one if it is active; one that has neither takes a place all the same.

  Attributes:
    rows: the slot of every token, within its pool.
    index: its number among those of its slot.
    positions: of its context; 0 for padding.
    last: the place of every slot's last token.
  """

  rows: Int[Array, "D N"]
  index: Int[Array, "D N"]
  positions: Int[Array, "D N"]
  last: Int[Array, "D R"]


def mixed_batch(
  starts: Int[Array, " S"],
  counts: Int[Array, " S"],
  active: Bool[Array, " S"],
  table: Int[Array, "S p"],
  num_tokens: int,
  page_size: int,
  layout: Layout,
) -> tuple[PageBatch, FlatTokens]:
  """For every slot counts[s] ≥ 0 tokens of a prompt behind starts[s] others, and the pending one if it is active.

  `num_tokens` of each pool hold max(counts[s] + active[s], 1) for all of its slots.
  """
  # The slot of every token, by the ends of the slots before it.
  pools = layout.shards("slots")
  by_pool = lambda x: x.reshape(pools, -1, *x.shape[1:])
  written = by_pool(counts + active)
  taken = jnp.maximum(written, 1)
  ends = jnp.cumsum(taken, axis=1, dtype=jnp.int32)
  token = jnp.arange(num_tokens, dtype=jnp.int32)
  rows = jax.vmap(lambda ends: jnp.searchsorted(ends, token, side="right").astype(jnp.int32))(ends)
  rows = jnp.minimum(rows, ends.shape[1] - 1)

  # Its position, and from that its page.
  take = lambda values: jnp.take_along_axis(values, rows, axis=1)
  index = token - take(ends - taken)
  real = index < take(written)
  positions = jnp.where(real, take(by_pool(starts)) + index, 0)
  page = jax.vmap(lambda table, row, index: table[row, index])(by_pool(table), rows, positions // page_size)

  # Each slot is a sequence with at least one query: an idle one reads one position, and nobody that.
  batch = PageBatch(
    pages=jnp.where(real, page, NOWHERE),
    offsets=positions % page_size,
    kv_lens=jnp.where(counts + active > 0, starts + counts + active, 1),
    page_indices=table,
    cu_q_lens=jnp.pad(ends, ((0, 0), (1, 0))).reshape(-1),
    num_seqs=jnp.full((pools,), ends.shape[1], jnp.int32),
  )
  return batch, FlatTokens(rows, index, positions, ends - 1)


def on_pools(fn: Callable[..., Any], layout: Layout, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
  """`fn` for every part of a mesh, which has the tokens of its own slots and their pages: nothing moves."""
  if layout.mesh is None:
    return fn
  return jax.shard_map(fn, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
