"""The smallest GLM-5 with everything that the family has."""

from __future__ import annotations

from sao_jax.config import ModelConfig

TINY = ModelConfig(
  vocab_size=40, num_layers=4, d_model=16, num_heads=2, num_kv_heads=2, head_dim=4, d_ff=24, num_experts=4,
  d_ff_expert=8, d_ff_shared=8, num_dense_layers=1, router="sigmoid", qk_norm=False, kv_lora_rank=6, q_lora_rank=10,
  qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3, index_topk=3, index_num_heads=2, index_head_dim=7,
  indexer_types=("full", "shared", "full", "shared"),
)  # fmt: skip
