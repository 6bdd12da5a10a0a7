"""One token per slot, and its log-probability under exactly the distribution that it was drawn from."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

# Tolerance of top-p: rounding of a cumulative sum must not let one more token into the set.
_TOP_P_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingRule:
  """The tokens that may be drawn: the `top_k` most probable (0: all), and of those the smallest set of mass `top_p`.

  Training samples without a filter, since the learner's log-probs are over the whole vocabulary.
  """

  top_p: float = 1.0
  top_k: int = 0

  @property
  def filters(self) -> bool:
    """True if the rule may exclude a token."""
    return self.top_p < 1.0 or self.top_k > 0


def slot_uniforms(
  key: Key[Array, ""], rollout_id: Int[Array, " R"], first_index: Int[Array, " R"], count: int
) -> Float[Array, "count R 2"]:
  """Returns the random numbers in [0, 1) of tokens `first_index` ... `first_index + count - 1` of every rollout.

  They depend only on the run key, the rollout id and the token's index in its trajectory: a rollout draws the same
  tokens in any slot, beside any other rollouts, and in any number of dispatches.
  """

  def of_token(rollout_key: jax.Array, index: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(rollout_key, index), (2,), dtype=jnp.float32)

  def of_rollout(rollout: jax.Array, index: jax.Array) -> jax.Array:
    indices = index + jnp.arange(count, dtype=jnp.int32)
    return jax.vmap(of_token, in_axes=(None, 0))(jax.random.fold_in(key, rollout), indices)

  return jax.vmap(of_rollout, out_axes=1)(rollout_id, first_index)


@jax.named_scope("sample")
def sample_tokens(
  logits: Float[Array, "R V"], uniforms: Float[Array, "R 2"], temperature: Float[Array, " R"], rule: SamplingRule
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
  """Draws one token per row from softmax(logits / temperature), restricted to what `rule` keeps.

  Args:
    logits: fp32.
    uniforms: two numbers in [0, 1) per row, from `slot_uniforms`.
    temperature: one per row; 0 takes the most probable token (of equal ones the lowest id).
    rule: the tokens that may be drawn (static).

  Returns:
    The tokens, int32, and their log-probabilities, fp32, normalised over the kept tokens and never above 0. At
    temperature 0 the log-probability is that of temperature 1.
  """
  greedy = temperature <= 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  if rule.filters:
    scaled = jnp.where(_kept(scaled, rule), scaled, -jnp.inf)
  peak = jnp.max(scaled, axis=-1, keepdims=True)
  weights = jnp.exp(scaled - peak)
  greedy_weights = (scaled == peak).astype(weights.dtype)
  tokens = draw(jnp.where(greedy[:, None], greedy_weights, weights), jnp.where(greedy[:, None], 0.0, uniforms))
  chosen = jnp.take_along_axis(scaled - peak, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - jnp.log(jnp.sum(weights, axis=-1))


def draw(weights: Float[Array, "R V"], uniforms: Float[Array, "R 2"]) -> Int[Array, " R"]:
  """Draws an index per row with probability weights / sum(weights); never one of weight 0.

  Inverse transform sampling on two levels: first a block of about sqrt(V) tokens, then a token of that block. Compared
  with Gumbel-max it takes two random numbers per row instead of V; compared with one level, the cumulative sums are
  short and fp32 resolves each level by itself.
  """
  rows, vocab = weights.shape
  width = 2 ** math.ceil(math.log2(vocab) / 2)
  blocks = jnp.pad(weights, ((0, 0), (0, -vocab % width))).reshape(rows, -1, width)
  block = _first_above(jnp.sum(blocks, axis=-1), uniforms[:, 0])
  within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return block * width + _first_above(within, uniforms[:, 1])


def _first_above(weights: Float[Array, "R N"], uniform: Float[Array, " R"]) -> Int[Array, " R"]:
  """Returns the first index of positive weight whose cumulative weight exceeds uniform · total.

  If rounding leaves no such index, the last one of positive weight. The condition on the weight is needed: a cumulative
  sum that is computed in parallel need not be equal on both sides of a weight of 0.
  """
  index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
  positive = weights > 0
  cumulative = jnp.cumsum(weights, axis=-1)
  above = cumulative > uniform[:, None] * cumulative[:, -1:]
  first = jnp.min(jnp.where(positive & above, index, index.size), axis=-1)
  return jnp.minimum(first, jnp.max(jnp.where(positive, index, 0), axis=-1))


def _kept(logits: Float[Array, "R V"], rule: SamplingRule) -> Bool[Array, "R V"]:
  """Marks the tokens that `rule` keeps; the most probable one is always kept, and equal ones rank by id."""
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  keep = jnp.arange(logits.shape[-1], dtype=jnp.int32) < (rule.top_k or logits.shape[-1])
  probs = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
  mass_before = jnp.cumsum(probs, axis=-1) - probs
  keep = keep & (mass_before < rule.top_p - _TOP_P_ROUNDING)
  keep = keep.at[:, 0].set(True)
  return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)
