"""The sigmoid router of DeepSeek-V3 and GLM: scores for the weights, scores plus a correction bias for the choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.linear import linear


def group_limited_route(
  x: Float[Array, "*batch D"], router: Float[Array, "D E"], correction_bias: Float[Array, " E"], config: ModelConfig
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
  """Weights and ids of the k chosen experts of every token, fp32 (arXiv 2412.19437, section 2.1.2).

  An expert is chosen by sigmoid(x · router) + bias, within the `num_groups_per_token` groups whose two best experts
  have the largest sum; of equal ones the lower id wins. Its weight is the score without the bias, which therefore
  has no gradient. Weights are divided by their sum (`renormalize_router`) and multiplied by `routed_scaling`.
  """
  logits = linear(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
  scores = jax.nn.sigmoid(logits)
  choice = scores + correction_bias.astype(jnp.float32)
  if config.num_expert_groups > 1:
    choice = _keep_best_groups(choice, config.num_expert_groups, config.num_groups_per_token)
  _, experts = jax.lax.top_k(choice, config.num_experts_per_token)
  weights = jnp.take_along_axis(scores, experts, axis=-1)
  if config.renormalize_router:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
  return weights * config.routed_scaling, experts


def _keep_best_groups(choice: Float[Array, "*batch E"], num_groups: int, num_kept: int) -> Float[Array, "*batch E"]:
  """-inf for the experts of all but the best groups."""
  grouped = choice.reshape(*choice.shape[:-1], num_groups, -1)
  group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
  _, kept = jax.lax.top_k(group_scores, num_kept)
  is_kept = jnp.any(kept[..., None] == jnp.arange(num_groups, dtype=kept.dtype), axis=-2)
  return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
