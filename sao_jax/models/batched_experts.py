"""The experts of few tokens on a CPU: all experts at once, each with equally many rows, in one batched product.

Groups of rows that are multiplied one after the other (`grouped_matmul.grouped_map`) take a dozen small operations
each, and in a decode step those cost more than the products. Here the rows are filled up instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sao_jax.models.experts import ExpertWeights, count_experts, count_groups, sort_by_expert

SPARE = 2  # rows of an expert, as a multiple of its even share: then one round is nearly always enough


def batched_experts(
  params: ExpertWeights, x: Float[Array, "N D"], weights: Float[Array, "N k"], experts: Int[Array, "N k"]
) -> Float[Array, "N D"]:
  """Σ_k weight · feed_forward(expert k, x), as `experts.expert_feed_forward` on one device; it has no gradient.

  An expert with more tokens than rows has another round, and all others with it: nothing is dropped.
  """
  (num_tokens, num_active), num_experts = experts.shape, count_experts(params)
  rows = expert_rows(num_tokens, num_active, num_experts)
  params = {name: weight.astype(x.dtype) for name, weight in params.items()}

  # The pairs (token, expert) in the order of the experts, and the place of each among those of its expert.
  ids = experts.reshape(-1)
  order, inverse = sort_by_expert(ids, num_experts)
  counts = count_groups(ids, num_experts)
  starts = jnp.cumsum(counts) - counts
  places = inverse.reshape(experts.shape) - starts[experts]

  def add_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    first, out = carry

    # Rows behind the last pair of an expert hold other tokens, and nobody reads them.
    pairs = starts[:, None] + first + jnp.arange(rows, dtype=jnp.int32)
    batch = x[order[jnp.minimum(pairs, order.size - 1)] // num_active]  # [E, rows, D]
    hidden = jax.nn.silu(batch @ params["gate"]) * (batch @ params["up"])
    made = (hidden @ params["down"]).reshape(num_experts * rows, -1)

    # Every token takes what its experts have made of it in this round.
    own = places - first
    inside = (own >= 0) & (own < rows)
    taken = made[experts * rows + jnp.clip(own, 0, rows - 1)]  # [N, k, D]
    weighted = jnp.where(inside[..., None], taken * weights[..., None].astype(taken.dtype), 0)
    return first + rows, out + jnp.sum(weighted, axis=1)

  unfinished = lambda carry: carry[0] < jnp.max(counts)
  return jax.lax.while_loop(unfinished, add_round, (jnp.int32(0), jnp.zeros_like(x)))[1]


def expert_rows(num_tokens: int, num_active: int, num_experts: int) -> int:
  """The rows of every expert in a round: `SPARE` times an even share, in eights; no expert has a token twice.

  >>> expert_rows(32, 2, 8), expert_rows(8, 2, 8), expert_rows(4, 2, 8)
  (16, 8, 4)
  """
  share = -(-SPARE * num_tokens * num_active // num_experts)
  return min(-(-share // 8) * 8, num_tokens)
