"""Embeddings and log-probabilities over a mesh: the two matrices with a row for every token of the vocabulary.

Each is gathered once for all tokens of a call, in the dtype of the activations, and once more for the backward pass;
its gradient is added up in fp32 and leaves as a reduce-scatter. Forward and backward are programs of one device
(`shard_map`), as for [experts](expert_shards.py): left to the partitioner, every block of log-probs gathers the head.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from sao_jax.parallel.layout import Layout
from sao_jax.parallel.staged_gather import Stage, gather, scatter_sum, stages


def can_gather_vocabulary(layout: Layout) -> bool:
  """Are there devices to gather from, and does every device of a "vocab" group have the same tokens?"""
  rules = layout.rules
  tokens = rules.mesh_axes("batch") + rules.mesh_axes("sequence")
  return layout.is_sharded and not set(tokens) & set(rules.mesh_axes("vocab"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sharded_embedding(
  layout: Layout, dtype: str, table: Float[Array, "V D"], token_ids: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
  """table[token_ids] in `dtype`: every device looks up the tokens whose rows it holds, the others add zeros."""
  axes = _axes(layout)

  def look_up(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    rows, here = _rows_here(token_ids, len(table), axes)
    table = gather(table.astype(dtype), axes.embed, 1)
    return jax.lax.psum(jnp.where(here[..., None], table[rows], 0), axes.vocab)

  states, tokens, table_spec = _specs(layout, "vocab", "embed")
  run = jax.shard_map(look_up, mesh=layout.mesh, in_specs=(table_spec, tokens), out_specs=states, check_vma=False)
  return run(table, token_ids)


def _embedding_forward(layout: Layout, dtype: str, table: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, Any]:
  return sharded_embedding(layout, dtype, table, token_ids), (table, token_ids)


def _embedding_backward(layout: Layout, dtype: str, operands: Any, out_grad: jax.Array) -> tuple[jax.Array, None]:
  table, token_ids = operands
  axes = _axes(layout)

  def add_up(table: jax.Array, token_ids: jax.Array, out_grad: jax.Array) -> jax.Array:
    rows, here = _rows_here(token_ids, len(table), axes)
    grad = jnp.zeros((scattered_size(len(table)), out_grad.shape[-1]), jnp.float32)
    grad = grad.at[rows].add(jnp.where(here[..., None], out_grad, 0).astype(jnp.float32))

    # Written out with the vocabulary behind: a TPU splits no lines of 128 numbers, and would add up in full.
    grad = with_layout_constraint(grad.T, ArrayLayout(major_to_minor=(0, 1)))
    return _scatter_gradient(grad, len(table), axes).T.astype(table.dtype)

  states, tokens, table_spec = _specs(layout, "vocab", "embed")
  in_specs = (table_spec, tokens, states)
  run = jax.shard_map(add_up, mesh=layout.mesh, in_specs=in_specs, out_specs=table_spec, check_vma=False)
  return run(table, token_ids, out_grad), None


sharded_embedding.defvjp(_embedding_forward, _embedding_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def sharded_logprobs(
  layout: Layout,
  temperature: float,
  chunk: int,
  head: Float[Array, "D V"],
  hidden: Float[Array, "B T D"],
  targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """log softmax(hidden · head / temperature) at `targets`, and the entropy of that distribution; fp32, in nats.

  Every device has the logits of about `chunk` of its own tokens in memory at a time, and of its part of the
  vocabulary; the backward pass computes them again.
  """
  axes = _axes(layout)

  def compute(head: jax.Array, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    head = gather(head.astype(hidden.dtype), axes.embed, 0)

    def of_block(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      distribution = _distribution(head, *block, temperature, axes)
      return distribution.chosen, distribution.entropy

    outputs = jax.lax.map(of_block, _blocks(chunk, hidden, targets))
    return tuple(_joined(output, targets.shape) for output in outputs)

  states, tokens, head_spec = _specs(layout, "embed", "vocab")
  in_specs = (head_spec, states, tokens)
  run = jax.shard_map(compute, mesh=layout.mesh, in_specs=in_specs, out_specs=(tokens, tokens), check_vma=False)
  return run(head, hidden, targets)


def _logprobs_forward(layout: Layout, temperature: float, chunk: int, *operands: jax.Array) -> tuple[Any, Any]:
  return sharded_logprobs(layout, temperature, chunk, *operands), operands


def _logprobs_backward(
  layout: Layout, temperature: float, chunk: int, operands: Any, out_grads: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
  axes = _axes(layout)

  def compute(
    head: jax.Array, hidden: jax.Array, targets: jax.Array, *out_grads: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    param_dtype, head = head.dtype, gather(head.astype(hidden.dtype), axes.embed, 0)
    size = head.shape[1]
    filled_up = scattered_size(size) - size

    def of_block(head_grad: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
      states, ids, chosen_grad, entropy_grad = block
      distribution = _distribution(head, states, ids, temperature, axes)

      # d log p_j / d logit_i = [i = j] - p_i, and d entropy / d logit_i = -p_i (log p_i + entropy).
      chosen_part = chosen_grad[:, None] * (distribution.is_chosen - distribution.probs)
      spread = distribution.probs * (distribution.logprobs + distribution.entropy[:, None])
      grad = ((chosen_part - entropy_grad[:, None] * spread) / temperature).astype(states.dtype)

      # Of the product of states and head, in fp32.
      wide = jnp.pad(grad, ((0, 0), (0, filled_up)))
      head_grad += jnp.dot(states.T, wide, preferred_element_type=jnp.float32)
      states_grad = jnp.dot(grad, head.T, preferred_element_type=jnp.float32)
      return head_grad, jax.lax.psum(states_grad, axes.vocab).astype(states.dtype)

    blocks = _blocks(chunk, hidden, targets, *out_grads)
    zeros = jnp.zeros((head.shape[0], size + filled_up), jnp.float32)
    head_grad, states_grad = jax.lax.scan(of_block, zeros, blocks)
    return _scatter_gradient(head_grad, size, axes).astype(param_dtype), _joined(states_grad, hidden.shape)

  states, tokens, head_spec = _specs(layout, "embed", "vocab")
  in_specs = (head_spec, states, *[tokens] * 3)
  run = jax.shard_map(compute, mesh=layout.mesh, in_specs=in_specs, out_specs=(head_spec, states), check_vma=False)
  return *run(*operands, *out_grads), None


sharded_logprobs.defvjp(_logprobs_forward, _logprobs_backward)


def scattered_size(size: int) -> int:
  """The rows of a gradient that leaves as a reduce-scatter: a vocabulary filled up, by 1/16 at most beyond one tile.

  A TPU scatters in equal pieces. It finds none where the number of tiles of 128 has a large prime factor, and adds up
  in full what it should scatter: tiles in at most 31 steps are pieces enough.

  >>> scattered_size(151_936), scattered_size(154_880), scattered_size(24)
  (155648, 155648, 128)
  """
  tiles = -(-size // 128)
  step = 1 << max(tiles.bit_length() - 5, 0)
  return 128 * step * -(-tiles // step)


class _Axes(NamedTuple):
  """Mesh axes by what is done over them, those of one device left out.

  Attributes:
    vocab: they split the vocabulary; sums over it are added.
    embed: the stages in which the model dimension is gathered.
    replicas: they split tokens, but not the matrices: gradients are added.
    copies: devices that have the same tokens and add the same gradient.
  """

  vocab: tuple[str, ...]
  embed: tuple[Stage, ...]
  replicas: tuple[str, ...]
  copies: int


def _axes(layout: Layout) -> _Axes:
  rules, shape = layout.rules, layout.mesh.shape
  several = lambda *names: tuple(axis for name in names for axis in rules.mesh_axes(name) if shape[axis] > 1)
  tokens, embed = several("batch", "sequence"), several("embed")
  return _Axes(
    vocab=several("vocab"),
    embed=stages(layout.mesh, embed),
    replicas=tuple(axis for axis in tokens if axis not in embed),
    copies=math.prod(shape[axis] for axis in embed if axis not in tokens),
  )


def _specs(layout: Layout, *matrix: str) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
  """The places of hidden states, of tokens, and of a matrix of these logical axes."""
  return layout.spec("batch", "sequence", None), layout.spec("batch", "sequence"), layout.spec(*matrix)


def _rows_here(token_ids: jax.Array, size: int, axes: _Axes) -> tuple[jax.Array, jax.Array]:
  """The row of each token among the `size` of this device, and True where it has one; the row is 0 elsewhere."""
  rows = token_ids - size * (jax.lax.axis_index(axes.vocab) if axes.vocab else 0)
  here = (rows >= 0) & (rows < size)
  return jnp.where(here, rows, 0), here


def _scatter_gradient(grad: jax.Array, size: int, axes: _Axes) -> jax.Array:
  """This device's rows of a gradient [D, scattered_size(size)], of the sum over all tokens; `size` columns of them."""
  total = jax.lax.psum(scatter_sum(grad, axes.embed, 0), axes.replicas) / axes.copies
  # A barrier: the compiler of TPUs may join what it cuts off here with a sum that it does in parts, and then fails.
  return jax.lax.optimization_barrier(total)[:, :size]


class _Distribution(NamedTuple):
  """The distributions of N tokens over this device's part of the vocabulary.

  Attributes:
    logprobs: [N, V here].
    probs: [N, V here].
    is_chosen: [N, V here], True at the token's id.
    chosen: [N], the log-probability of the token.
    entropy: [N].
  """

  logprobs: jax.Array
  probs: jax.Array
  is_chosen: jax.Array
  chosen: jax.Array
  entropy: jax.Array


def _distribution(head: jax.Array, states: jax.Array, ids: jax.Array, temperature: float, axes: _Axes) -> _Distribution:
  logits = jnp.dot(states, head, preferred_element_type=jnp.float32) / temperature
  add = functools.partial(jax.lax.psum, axis_name=axes.vocab)

  # log softmax and its entropy from one exponential.
  logits -= jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), axes.vocab)
  exps = jnp.exp(logits)
  total = add(jnp.sum(exps, axis=-1, keepdims=True))
  log_total = jnp.log(total)
  entropy = (log_total - add(jnp.sum(exps * logits, axis=-1, keepdims=True)) / total)[:, 0]

  # The chosen token is on one device of the group.
  rows, here = _rows_here(ids, head.shape[1], axes)
  is_chosen = here[:, None] & (rows[:, None] == jnp.arange(head.shape[1]))
  chosen = add(jnp.where(here, jnp.take_along_axis(logits, rows[:, None], axis=-1)[:, 0], 0)) - log_total[:, 0]
  return _Distribution(logits - log_total, exps / total, is_chosen, chosen, entropy)


def _blocks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Arrays [B, T, ...] as [blocks, tokens, ...], as equal as they can be, the last one filled up with zeros."""
  rows, length = arrays[0].shape[:2]
  number = -(-rows * length // chunk)
  width = -(-rows * length // number)

  def split(array: jax.Array) -> jax.Array:
    rest = array.shape[2:]
    flat = array.reshape(rows * length, *rest)
    flat = jnp.pad(flat, ((0, number * width - rows * length), *((0, 0),) * len(rest)))
    return flat.reshape(number, width, *rest)

  return tuple(split(array) for array in arrays)


def _joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The inverse of `_blocks` for one array."""
  return blocks.reshape(-1, *blocks.shape[2:])[: math.prod(shape[:2])].reshape(shape)
