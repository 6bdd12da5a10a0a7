"""FLOPs that a model needs, whatever program computes them: of a token, and of a train step of SAO.

A multiplication with its addition is two. Attention is causal: a query reads half of the row that it stands in, or what
an indexer lets it read. What is computed again in a backward pass does not count.
"""

from __future__ import annotations

import dataclasses

from sao_jax.config import ModelConfig, RunConfig


@dataclasses.dataclass(frozen=True)
class TokenFlops:
  """FLOPs of one token in a forward pass, over all layers.

  Attributes:
    projections: of attention: queries, keys, values, output.
    scores: of attention itself: q kᵀ and what follows.
    indexer: of sparse attention: the scores by which positions are chosen. It has no gradient.
    feed_forward: dense layers, routers, chosen and shared experts.
    head: the logits.
  """

  projections: float
  scores: float
  indexer: float
  feed_forward: float
  head: float

  @property
  def trunk(self) -> float:
    """Everything but the head."""
    return self.projections + self.scores + self.indexer + self.feed_forward


def token_flops(model: ModelConfig, length: float) -> TokenFlops:
  """FLOPs of a token that lies in a row of `length` tokens, on average over the row."""
  dim, layers, heads = model.d_model, model.num_layers, model.num_heads
  reads = length / 2

  # Attention: the matrices of a layer, and its scores.
  indexer = 0.0
  if model.is_latent:
    keys, values = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    queries = dim * model.q_lora_rank + model.q_lora_rank * heads * keys
    latent = dim * (model.kv_lora_rank + model.qk_rope_head_dim)
    expanded = model.kv_lora_rank * heads * (model.qk_nope_head_dim + values)
    matrices = queries + latent + expanded + heads * values * dim
    if model.index_topk:
      full = model.indexer_types.count("full") if model.indexer_types else layers
      width = model.index_num_heads * model.index_head_dim
      own = model.q_lora_rank * width + dim * (model.index_head_dim + model.index_num_heads)
      indexer = 2.0 * full * (own + width * reads)
      reads = min(reads, model.index_topk)
  else:
    keys = values = model.head_dim
    matrices = dim * keys * (heads + 2 * model.num_kv_heads) + heads * values * dim
  scores = 2.0 * layers * heads * reads * (keys + values)

  # Feed-forward: three matrices each, dense or of the chosen experts.
  experts = model.num_experts_per_token * 3 * dim * model.d_ff_expert
  expert_layer = experts + 3 * dim * model.d_ff_shared + dim * model.num_experts
  feed_forward = model.num_mlp_layers * 3 * dim * model.d_ff + model.num_moe_layers * expert_layer
  return TokenFlops(2.0 * layers * matrices, scores, indexer, 2.0 * feed_forward, 2.0 * dim * model.vocab_size)


def step_flops(config: RunConfig, length: float) -> float:
  """FLOPs of a train step per token: the policy's update, K of the critic, and the values that advantages need.

  A backward pass costs twice its forward pass, or once where weights are frozen: input gradients only. So are all with
  LoRA, whose own products are few.
  """
  flops, algorithm = token_flops(config.model, length), config.algorithm
  differentiable = flops.projections + flops.scores + flops.feed_forward
  weights = flops.projections + flops.feed_forward
  policy = 3 * (differentiable + flops.head) + flops.indexer
  if config.model.lora.rank:
    policy -= weights + flops.head
  if not algorithm.needs_critic:
    return policy
  frozen = flops.projections if algorithm.freeze_attention else 0.0
  frozen = weights if config.critic.lora.rank else frozen
  update = 3 * differentiable - frozen + flops.indexer
  return policy + algorithm.value_updates * update + flops.trunk
