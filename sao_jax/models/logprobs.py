"""Log-probabilities of given tokens, in chunks: the logits of the whole batch are never built."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.transformer import head_logits, output_head
from sao_jax.models.vocabulary_shards import can_gather_vocabulary, sharded_logprobs
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params


def has_prefix(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """True where the token before this one in the row belongs to the same segment; False on padding."""
  same = segment_ids[:, 1:] == segment_ids[:, :-1]
  return jnp.pad(same, ((0, 0), (1, 0)), constant_values=False) & (segment_ids > 0)


@jax.named_scope("logprobs")
def token_logprobs(
  params: Params,
  config: ModelConfig,
  hidden: Float[Array, "B T D"],
  token_ids: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"] | None = None,
  *,
  temperature: float = 1.0,
  chunk: int = 1024,
  layout: Layout = ONE_DEVICE,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """log π(token_t | tokens before t) and the entropy of the distribution that token t was drawn from, in nats.

  Token-aligned: entry t comes from hidden[t - 1]. Both are 0 where there is no distribution: on the first token of a
  row or segment, and on padding. fp32.

  Args:
    params: the policy's parameters.
    config: static.
    hidden: final hidden states.
    token_ids: the tokens.
    segment_ids: segments of packed rows; None: every row is one sequence.
    temperature: logits are divided by it, as in the sampler.
    chunk: about how many tokens of one device (at least one of every row) have their logits [chunk, V] in memory
      at a time, also in the backward pass, which computes them again.
    layout: the one that parameters and batch are placed by.
  """
  targets = jnp.roll(token_ids, -1, axis=1)
  if can_gather_vocabulary(layout):
    outputs = sharded_logprobs(layout, temperature, chunk, output_head(params, config), hidden, targets)
  else:
    outputs = _logprobs_of_next(params, config, hidden, targets, temperature, chunk, layout)

  # Of the next token -> of this token.
  valid = has_prefix(jnp.ones_like(token_ids) if segment_ids is None else segment_ids)
  logprobs, entropy = (jnp.where(valid, jnp.roll(x, 1, axis=1), 0.0) for x in outputs)
  return logprobs, entropy


def _logprobs_of_next(
  params: Params,
  config: ModelConfig,
  hidden: jax.Array,
  targets: jax.Array,
  temperature: float,
  chunk: int,
  layout: Layout,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs [B, T] of the targets, and entropies, on one device, or as the partitioner sees fit."""
  # Every context shard has `own` positions of a row. Blocks of `width` of them, as equal as they can be.
  rows, length = targets.shape
  shards = layout.shards("sequence")
  own = length // shards
  num_blocks = -(-rows * length // (chunk * layout.shards("batch", "sequence")))
  width = -(-own // num_blocks)
  num_blocks = -(-own // width)

  # A block has positions of all shards, so that none waits for another: [B, T, ...] -> [num_blocks, B, c, width, ...].
  def blocks(x: jax.Array) -> jax.Array:
    rest = x.shape[2:]
    x = x.reshape(rows, shards, own, *rest)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, num_blocks * width - own)) + ((0, 0),) * len(rest))
    x = jnp.moveaxis(x.reshape(rows, shards, num_blocks, width, *rest), 2, 0)
    return layout.constrain(x, None, "batch", "sequence", *(None,) * (x.ndim - 3))

  def block_logprobs(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    states, ids = block
    logits = head_logits(params, config, states, layout) / temperature
    logits = layout.constrain(logits, "batch", "sequence", None, "vocab")

    # log softmax and its entropy from one exponential.
    logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    exps = jnp.exp(logits)
    total = jnp.sum(exps, axis=-1)
    log_total = jnp.log(total)
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return chosen - log_total, log_total - jnp.sum(exps * logits, axis=-1) / total

  if num_blocks > 1:  # with one block the logits may as well be kept for the backward pass
    block_logprobs = jax.checkpoint(block_logprobs, prevent_cse=False)
  outputs = jax.lax.map(block_logprobs, (blocks(hidden), blocks(targets)))

  # [num_blocks, B, c, width] -> [B, T]
  def joined(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, 2).reshape(rows, shards, -1)[:, :, :own].reshape(rows, length)

  return joined(outputs[0]), joined(outputs[1])
