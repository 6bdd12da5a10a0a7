"""Pallas kernels of attention over selected latents: those of a range of positions stay in VMEM while queries pass.

Latents of 1152 bytes are too small to be copied one by one: starting a copy takes longer than multiplying its row. So
whole ranges of latents lie in VMEM, as long as fit, and a query gathers those that it selected there, by loads of
single rows. A selection is ascending, so what a query reads of a range is a stretch of it. Queries pass once for each
range; the results of ranges are put together outside (`selected_ranges`).

`CHUNK` selected rows are multiplied at a time; the last ones of a range are filled up with zeros, to a whole or to half
a chunk. Gradients of latents are added up in VMEM, too, in fp32 and a row at a time; a range of them is read and
written once in each call by each of the two parts of its queries, which the cores of a chip share.

The declared costs are those of all bytes between HBM and VMEM, and of the chunks: a quarter of one is filled up in
every range on average. A roofline does not see the rows. To gather one takes 3 loads, 3 stores and a rotation of lanes,
to add one up 10 loads, 5 stores and a rotation. At 5 cycles forwards and 15 backwards that is about a minute of each
step of GLM-5.2 for all forward passes, and another for the backward passes, as far as it is not done beside products;
an estimate. Nor does it see that 64 heads fill half of a matrix unit of 128 x 128, and that late queries meet more
ranges than early ones: of a row over several devices, the last one is slowest, and for it the costs are declared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from sao_jax.models.attention.latent_words import LANES, SUBLANES, Form, Ranges, Words, unpack

CHUNK = 128  # selected rows that are multiplied at a time; half of it is a multiple of `SUBLANES`
QUERIES = 8  # of a block
PARTS = 2  # of the blocks; each core of a chip that has two takes one, with all ranges, since early queries need few
VMEM_BYTES = 64 * 2**20  # of a core of a v5p and of a tpu7x; others have more
UNREAD = -1e30  # the logarithm of a sum over nothing; finite, so that differences are


def block_bytes(queries: Float[Array, "B T H m"], form: Form) -> int:
  """The bytes of VMEM that queries take beside a range, in the backward pass, which takes more of it.

  Two blocks at a time, one computed and one on its way, of queries, their gradients and those of weighted sums; and
  as much of one query in fp32, while it is computed.
  """
  width, rank = (size + -size % LANES for size in (form.width, form.rank))
  numbers = queries.shape[2] * (2 * width + rank)
  return 2 * QUERIES * numbers * queries.dtype.itemsize + 4 * numbers


def forward_kernel(
  queries: Float[Array, "B T H m"],
  words: Words,
  selection: Int[Array, "B N Q k"],
  bounds: Int[Array, "B N Q _"],
  ranges: Ranges,
  form: Form,
  scale: float,
  *,
  interpret: bool,
) -> tuple[Float[Array, "R B T H c"], Float[Array, "R B N H Q"]]:
  """For each range, the weighted sums of the compressed vectors selected there, and log Σ exp(scores).

  Args:
    queries: absorbed queries; T = N · Q.
    words: `pack`ed latents of all ranges.
    selection: positions, ascending, in blocks of Q queries; N is even.
    bounds: the index in the selection at which each range begins; last, the end.
    ranges: of positions.
    form: of latents.
    scale: factor on the scores.
    interpret: in Pallas' interpreter.
  """
  batch, length, heads, width = queries.shape
  blocks, count = selection.shape[1], ranges.count
  at = functools.partial(_block_at, blocks)
  out = jax.ShapeDtypeStruct((count, batch, length, heads, form.rank), queries.dtype)
  logsumexp = jax.ShapeDtypeStruct((count, batch, blocks, heads, QUERIES), jnp.float32)
  return pl.pallas_call(
    functools.partial(_forward, form=form, keys=ranges.keys, scale=scale),
    grid=(PARTS, batch, count, blocks // PARTS),
    in_specs=[
      *_small_specs(selection, bounds),
      pl.BlockSpec((1, QUERIES, heads, width), lambda p, b, r, n: (b, at(p, n), 0, 0)),
      pl.BlockSpec(memory_space=pl.ANY),
      pl.BlockSpec(memory_space=pl.ANY),
    ],
    out_specs=[
      pl.BlockSpec((1, 1, QUERIES, heads, form.rank), lambda p, b, r, n: (r, b, at(p, n), 0, 0)),
      pl.BlockSpec((1, 1, 1, heads, QUERIES), lambda p, b, r, n: (r, b, at(p, n), 0, 0)),
    ],
    out_shape=[out, logsumexp],
    scratch_shapes=_word_scratch(words, ranges, form),
    compiler_params=_compiler_params(),
    cost_estimate=_cost(queries, words, selection, ranges, width + form.rank, [queries] * count, [out, logsumexp]),
    name="selected_attention_forward",
    interpret=interpret,
  )(bounds, selection, queries, *words)


def backward_kernel(
  queries: Float[Array, "B T H m"],
  words: Words,
  selection: Int[Array, "B N Q k"],
  bounds: Int[Array, "B N Q _"],
  of_out: Float[Array, "B T H c"],
  sums: Float[Array, "B N H _"],
  total: tuple[Float[Array, "BP _ c"], Float[Array, "BP _ l"]],
  ranges: Ranges,
  form: Form,
  scale: float,
  *,
  interpret: bool,
) -> tuple[Float[Array, "R B T H m"], Float[Array, "BP _ c"], Float[Array, "BP _ l"]]:
  """For each range, the gradient of queries that it makes; and `total` with the gradients of latents added.

  Args:
    queries: see `forward_kernel`; so are the others that are not named here.
    words: of latents.
    selection: of positions.
    bounds: of ranges.
    of_out: gradients of the weighted sums.
    sums: of every query of a block, log Σ exp(scores) over all ranges; then of all, Σ out · of_out.
    total: fp32, the gradients of latents so far, as their `Words` lie: those of all rows that the first part of the
      queries makes, then those of the second. Its memory is used again.
    ranges: of positions.
    form: of latents.
    scale: factor on the scores.
    interpret: in Pallas' interpreter.
  """
  batch, length, heads, width = queries.shape
  blocks, count = selection.shape[1], ranges.count
  at = functools.partial(_block_at, blocks)
  of_queries = jax.ShapeDtypeStruct((count, *queries.shape), queries.dtype)
  rotary = words.rotary.shape[2]
  streams = [queries, of_out, sums] * count + [*total]
  return pl.pallas_call(
    functools.partial(_backward, form=form, keys=ranges.keys, scale=scale),
    grid=(PARTS, batch, count, blocks // PARTS),
    in_specs=[
      *_small_specs(selection, bounds),
      pl.BlockSpec((1, QUERIES, heads, width), lambda p, b, r, n: (b, at(p, n), 0, 0)),
      pl.BlockSpec((1, QUERIES, heads, form.rank), lambda p, b, r, n: (b, at(p, n), 0, 0)),
      pl.BlockSpec((1, 1, heads, 2 * QUERIES), lambda p, b, r, n: (b, at(p, n), 0, 0)),
      *[pl.BlockSpec(memory_space=pl.ANY)] * 4,
    ],
    out_specs=[
      pl.BlockSpec((1, 1, QUERIES, heads, width), lambda p, b, r, n: (r, b, at(p, n), 0, 0)),
      *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
    ],
    out_shape=[of_queries, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in total)],
    scratch_shapes=[
      *_word_scratch(words, ranges, form),
      pltpu.VMEM((ranges.keys, form.rank), jnp.float32),
      pltpu.VMEM((ranges.keys // form.sharing, rotary), jnp.float32),
      pltpu.VMEM((CHUNK, form.rank), jnp.float32),
      pltpu.VMEM((CHUNK, rotary), jnp.float32),
      pltpu.VMEM((heads, width), jnp.float32),
    ],
    input_output_aliases={7: 1, 8: 2},
    compiler_params=_compiler_params(),
    cost_estimate=_cost(queries, words, selection, ranges, 3 * width + 2 * form.rank, streams, [of_queries, *total]),
    name="selected_attention_backward",
    interpret=interpret,
  )(bounds, selection, queries, of_out, sums, *words, *total)


def _forward(
  bounds: Any,
  selection: Any,
  queries: Any,
  compressed: Any,
  rotary: Any,
  out: Any,
  logsumexp: Any,
  *words: Any,
  form: Form,
  keys: int,
  scale: float,
) -> None:
  """The body of `forward_kernel`: a block of queries reads what it selected in a range."""
  (row, number), heads = (pl.program_id(1), pl.program_id(2)), queries.shape[2]

  @pl.when(pl.program_id(3) == 0)
  def _fetch_range() -> None:
    _copy(zip((compressed, rotary), words[:2], strict=True), row, number)

  def query(i: jax.Array, of_block: jax.Array) -> jax.Array:
    first, last = bounds[0, 0, i, number], bounds[0, 0, i, number + 1]
    own = queries[0, i]

    # The softmax goes on from chunk to chunk: its largest score, its sum, and the weighted sum.
    def chunk(size: int, start: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
      top, total, weighted = carry
      rows, here = _gather(_Stretch(selection, i, start, last, number * keys), size, words, form)
      scores = jnp.where(here, _dot(own, rows, 1, 1) * scale, UNREAD)
      new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
      weights, shrink = jnp.exp(scores - new_top), jnp.exp(top - new_top)
      total = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
      weighted = weighted * shrink + _dot(weights.astype(form.dtype), rows[:, : form.rank], 1, 0)
      return new_top, total, weighted

    column = lambda value: jnp.full((heads, 1), value, jnp.float32)
    start = column(UNREAD), column(0.0), jnp.zeros((heads, form.rank), jnp.float32)
    top, total, weighted = _for_chunks(chunk, first, last, start)

    # A query that selected nothing here gives nothing.
    some = total > 0
    out[0, 0, i] = (weighted / jnp.where(some, total, 1.0)).astype(out.dtype)
    of_query = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), UNREAD)
    return jnp.where(_lane(of_block) == i, of_query, of_block)

  logsumexp[0, 0, 0] = jax.lax.fori_loop(0, QUERIES, query, jnp.zeros((heads, QUERIES), jnp.float32))


def _backward(
  bounds: Any,
  selection: Any,
  queries: Any,
  of_out: Any,
  sums: Any,
  compressed: Any,
  rotary: Any,
  total: Any,
  total_rotary: Any,
  of_queries: Any,
  new_total: Any,
  new_total_rotary: Any,
  *scratch: Any,
  form: Form,
  keys: int,
  scale: float,
) -> None:
  """The body of `backward_kernel`: a block of queries adds its gradients to those of a range."""
  words, totals, (of_rows, of_rotary, of_query) = scratch[:4], scratch[4:6], scratch[6:]
  row, number, rank = pl.program_id(1), pl.program_id(2), form.rank
  row_of_part = pl.program_id(0) * pl.num_programs(1) + row

  @pl.when(pl.program_id(3) == 0)
  def _fetch_range() -> None:
    _copy(zip((compressed, rotary), words[:2], strict=True), row, number)
    _copy(zip((total, total_rotary), totals, strict=True), row_of_part, number)
    of_rotary[...] = jnp.zeros_like(of_rotary)  # lanes that belong to no number stay so

  def query(i: jax.Array, _: None) -> None:
    first, last = bounds[0, 0, i, number], bounds[0, 0, i, number + 1]
    own, of_own, of_block = queries[0, i], of_out[0, i], sums[0, 0]
    column = lambda lane: jnp.sum(jnp.where(_lane(of_block) == lane, of_block, 0.0), axis=1, keepdims=True)
    logsumexp, mean = column(i), column(QUERIES + i)
    of_query[...] = jnp.zeros_like(of_query)

    def chunk(size: int, start: jax.Array, _: None) -> None:
      stretch = _Stretch(selection, i, start, last, number * keys)
      rows, here = _gather(stretch, size, words, form)

      # Through the weighted sum and the softmax.
      scores = _dot(own, rows, 1, 1) * scale
      weights = jnp.where(here, jnp.exp(scores - logsumexp), 0.0)
      of_weights = _dot(of_own, rows[:, :rank], 1, 1)
      of_scores = (weights * (of_weights - mean) * scale).astype(form.dtype)

      # A latent is a key with all its numbers, a value with the first ones. Rows that fill the chunk up get zeros.
      of_query[...] += _dot(of_scores, rows, 1, 0)
      of_keys = _dot(of_scores, own, 0, 0)
      of_rows[:size] = of_keys[:, :rank] + _dot(weights.astype(form.dtype), of_own, 0, 0)
      of_rotary[:size, : form.width - rank] = of_keys[:, rank:]

      def add(slot: jax.Array, position: jax.Array) -> None:
        totals[0][pl.ds(position, 1), :] += of_rows[pl.ds(slot, 1), :]
        at, lane = _place(position, form)
        totals[1][at, :] += _roll(of_rotary[pl.ds(slot, 1), :], lane, form)

      _for_each(stretch, size, add)

    _for_chunks(chunk, first, last, None)
    of_queries[0, 0, i] = of_query[...].astype(of_queries.dtype)

  jax.lax.fori_loop(0, QUERIES, query, None)

  @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
  def _keep_range() -> None:
    _copy(zip((new_total, new_total_rotary), totals, strict=True), row_of_part, number, back=True)


class _Stretch(NamedTuple):
  """The part of a selection that lies in a range, from one of its chunks on.

  Attributes:
    selection: of the block of queries.
    query: its number in the block.
    start: the index in its selection.
    last: the index at which the range ends.
    base: the first position of the range.
  """

  selection: Any
  query: Any
  start: Any
  last: Any
  base: Any


def _for_chunks(chunk: Callable[[int, jax.Array, Any], Any], first: jax.Array, last: jax.Array, carry: Any) -> Any:
  """`chunk` (size, start, carry) -> carry for whole chunks, then for half of one, if what remains fits into it."""
  half = CHUNK // 2
  whole = pl.cdiv(last - first - half, CHUNK)
  carry = jax.lax.fori_loop(0, whole, lambda c, carry: chunk(CHUNK, first + c * CHUNK, carry), carry)
  rest = first + whole * CHUNK
  return jax.lax.fori_loop(0, (rest < last).astype(jnp.int32), lambda _, carry: chunk(half, rest, carry), carry)


def _gather(stretch: _Stretch, size: int, words: tuple[Any, ...], form: Form) -> tuple[jax.Array, jax.Array]:
  """The latents of a chunk, [size, m], zeros behind the last one; and [1, size], where there are any.

  Args:
    stretch: begins with the chunk.
    size: of the chunk.
    words: those of the range, compressed and rotary, and room for those of a chunk.
    form: of latents.
  """
  of_range, of_range_rotary, compressed, rotary = words

  def load(slot: jax.Array, position: jax.Array) -> None:
    compressed[pl.ds(slot, 1), :] = of_range[pl.ds(position, 1), :]
    at, lane = _place(position, form)
    rotary[pl.ds(slot, 1), :] = _roll(of_range_rotary[at, :], -lane, form)

  _for_each(stretch, size, load)
  count = stretch.last - stretch.start
  rows = unpack(compressed[:size], rotary[:size], form)
  rows = jnp.where(jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < count, rows, jnp.zeros_like(rows))
  return rows, jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < count


def _for_each(stretch: _Stretch, size: int, do: Callable[[jax.Array, jax.Array], None]) -> None:
  """`do` (slot, position in the range) for the selected positions of a chunk, then up to seven times for the last one.

  Eight at a time: a loop around a single row costs more than the row.
  """
  selection, query, start, last, base = stretch

  def group(number: jax.Array, _: None) -> None:
    for each in range(SUBLANES):
      slot = number * SUBLANES + each
      do(slot, selection[0, 0, query, jnp.minimum(start + slot, last - 1)] - base)

  jax.lax.fori_loop(0, pl.cdiv(jnp.minimum(last - start, size), SUBLANES), group, None)


def _place(position: jax.Array, form: Form) -> tuple[Any, jax.Array]:
  """The row and the first lane of a latent's rotary numbers."""
  sharing = form.sharing  # a power of two
  return pl.ds(position >> sharing.bit_length() - 1, 1), (position & sharing - 1) * form.lanes


def _roll(row: jax.Array, lanes: jax.Array, form: Form) -> jax.Array:
  """A row of lanes, moved to the right."""
  return row if form.sharing == 1 else pltpu.roll(row, lanes & LANES - 1, 1)


def _copy(pairs: Iterable[tuple[Any, Any]], row: jax.Array, number: jax.Array, *, back: bool = False) -> None:
  """Copies a range of arrays in HBM to VMEM, or back; an array in VMEM holds nothing else.

  Args:
    pairs: (array in HBM, array in VMEM); a row of an array may belong to several positions.
    row: of the batch.
    number: of the range.
    back: from VMEM.
  """
  for in_hbm, in_vmem in pairs:
    rows = in_vmem.shape[0]
    part = in_hbm.at[row, pl.ds(pl.multiple_of(number * rows, min(rows, SUBLANES)), rows)]
    pltpu.sync_copy(*((in_vmem, part) if back else (part, in_vmem)))


def _lane(x: jax.Array) -> jax.Array:
  return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
  """A product over these axes, with sums in fp32."""
  return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _small_specs(selection: Any, bounds: Any) -> list[pl.BlockSpec]:
  """Bounds and selection of a block of queries, in SMEM."""
  place = lambda p, b, r, n: (b, _block_at(selection.shape[1], p, n), 0, 0)
  return [pl.BlockSpec((1, 1, *x.shape[2:]), place, memory_space=pltpu.SMEM) for x in (bounds, selection)]


def _block_at(blocks: int, part: Any, number: Any) -> Any:
  """The number of a block among all, from that in its part."""
  return part * (blocks // PARTS) + number


def _word_scratch(words: Words, ranges: Ranges, form: Form) -> list[Any]:
  """Room for the words of a range, and of a chunk."""
  widths = words.compressed.shape[2], words.rotary.shape[2]
  rows = ranges.keys, ranges.keys // form.sharing, CHUNK, CHUNK
  return [pltpu.VMEM(shape, jnp.int32) for shape in zip(rows, widths * 2, strict=True)]


def _compiler_params() -> Any:
  return pltpu.CompilerParams(dimension_semantics=("parallel", *["arbitrary"] * 3), vmem_limit_bytes=VMEM_BYTES)


def _cost(queries: Any, words: Any, selection: Any, ranges: Ranges, products: int, read: Any, written: Any) -> Any:
  """The cost of a kernel, with `products` numbers multiplied for every head and selected row."""
  batch, length, heads, _ = queries.shape
  pairs = batch * length * heads * (selection.shape[3] + ranges.count * CHUNK // 4)
  size = lambda x: x.size * jnp.dtype(x.dtype).itemsize
  moved = [*words * PARTS, *[selection] * ranges.count, *read, *written]
  return pl.CostEstimate(flops=2 * pairs * products, transcendentals=pairs, bytes_accessed=sum(size(x) for x in moved))
