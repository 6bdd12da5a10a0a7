"""Log-probabilities of given tokens, in chunks: the logits of the whole batch are never built."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.transformer import head_logits
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params


def has_prefix(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
  """True where the token before this one in the row belongs to the same segment; False on padding."""
  same = segment_ids[:, 1:] == segment_ids[:, :-1]
  return jnp.pad(same, ((0, 0), (1, 0)), constant_values=False) & (segment_ids > 0)


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
    chunk: about how many tokens of one data shard (at least one of every row) have their logits [chunk, V] in memory
      at a time, also in the backward pass, which computes them again.
    layout: the one that parameters and batch are placed by.
  """
  # Blocks of `width` positions of every row, as equal as they can be.
  rows, length = token_ids.shape
  num_blocks = -(-rows * length // (chunk * layout.shards("batch")))
  width = -(-length // num_blocks)
  num_blocks = -(-length // width)

  targets = jnp.roll(token_ids, -1, axis=1)

  def blocks(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [num_blocks, B, width, ...]
    x = jnp.pad(x, ((0, 0), (0, num_blocks * width - length)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, num_blocks, width, *x.shape[2:]), 1, 0)

  def block_logprobs(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    states, ids = block
    logits = head_logits(params, config, states, layout) / temperature
    logits = layout.constrain(logits, "batch", None, "vocab")

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
  valid = has_prefix(jnp.ones_like(token_ids) if segment_ids is None else segment_ids)

  def token_aligned(x: jax.Array) -> jax.Array:  # [num_blocks, B, width], of the next token -> [B, T], of this token
    x = jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length]
    return jnp.where(valid, jnp.roll(x, 1, axis=1), 0.0)

  return token_aligned(outputs[0]), token_aligned(outputs[1])
