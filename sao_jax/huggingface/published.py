"""Configurations of published models, and their sizes computed from our parameter declarations.

Each shape is taken from the config.json at the URL beside it, the published sizes from the model's card on that page.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from sao_jax.config import ModelConfig, YarnConfig
from sao_jax.models.experts import EXPERT_WEIGHTS
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import count_params, path_name
from sao_jax.sampler.caches import empty_cache


@dataclasses.dataclass(frozen=True)
class Published:
  """A published model.

  Attributes:
    model: its shape.
    total: parameters in billions, as published.
    active: parameters that one token meets, in billions, as published.
    source: URL of its config.json.
  """

  model: ModelConfig
  total: float
  active: float
  source: str


QWEN3 = ModelConfig(vocab_size=151_936, head_dim=128, rope_theta=1e6, max_positions=40_960, dtype="bfloat16")
QWEN3_MOE = dataclasses.replace(QWEN3, num_kv_heads=4, num_experts=128, num_experts_per_token=8)
GLM = ModelConfig(
  vocab_size=151_552,
  num_heads=96,
  num_kv_heads=8,
  head_dim=128,
  num_experts_per_token=8,
  router="sigmoid",
  attention_bias=True,
  rope_theta=1e6,
  rotary_fraction=0.5,
  max_positions=131_072,
  rms_norm_eps=1e-5,
  dtype="bfloat16",
)
GLM5 = ModelConfig(
  vocab_size=154_880,
  num_layers=78,
  d_model=6144,
  num_heads=64,
  num_kv_heads=64,
  head_dim=64,
  d_ff=12_288,
  num_experts=256,
  num_experts_per_token=8,
  d_ff_expert=2048,
  d_ff_shared=2048,
  num_dense_layers=3,
  router="sigmoid",
  routed_scaling=2.5,
  qk_norm=False,
  kv_lora_rank=512,
  q_lora_rank=2048,
  qk_nope_head_dim=192,
  qk_rope_head_dim=64,
  v_head_dim=256,
  index_topk=2048,
  index_num_heads=32,
  index_head_dim=128,
  rope_theta=1e6,
  max_positions=202_752,
  rms_norm_eps=1e-5,
  dtype="bfloat16",
)
# A bias of queries, keys and values, but no norms of queries and keys; so the distillates of DeepSeek-R1.
QWEN25 = dataclasses.replace(QWEN3, num_layers=28, qk_norm=False, attention_bias=True, max_positions=131_072)
LLAMA = ModelConfig(
  num_kv_heads=8,
  head_dim=128,
  qk_norm=False,
  rope_theta=5e5,
  max_positions=131_072,
  rms_norm_eps=1e-5,
  dtype="bfloat16",
)
LLAMA31 = dataclasses.replace(
  LLAMA, vocab_size=128_256, yarn=YarnConfig(8.0, 8192, beta_fast=4.0, attention_factor=1.0, ramp="turns")
)
DEEPSEEK = ModelConfig(
  vocab_size=129_280,
  num_layers=61,
  d_model=7168,
  num_heads=128,
  num_kv_heads=128,
  head_dim=64,
  d_ff=18_432,
  num_experts=256,
  num_experts_per_token=8,
  d_ff_expert=2048,
  d_ff_shared=2048,
  num_dense_layers=3,
  router="sigmoid",
  num_expert_groups=8,
  num_groups_per_token=4,
  routed_scaling=2.5,
  qk_norm=False,
  kv_lora_rank=512,
  q_lora_rank=1536,
  qk_nope_head_dim=128,
  qk_rope_head_dim=64,
  v_head_dim=128,
  yarn=YarnConfig(40.0, 4096, attention_factor=1.0, mscale_all_dim=1.0),
  max_positions=163_840,
  dtype="bfloat16",
)
# Layers 0, 1, 2, 6, 10, ..., 74 have an indexer.
GLM52_INDEXERS = tuple("full" if i < 3 or i % 4 == 2 else "shared" for i in range(78))

PUBLISHED = {
  "Qwen3-0.6B": Published(
    dataclasses.replace(
      QWEN3, num_layers=28, d_model=1024, num_heads=16, num_kv_heads=8, d_ff=3072, tie_embeddings=True
    ),
    total=0.596,  # 0.44 and the embedding, which is also the head
    active=0.596,
    source="https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json",
  ),
  "Qwen3-4B": Published(
    dataclasses.replace(
      QWEN3, num_layers=36, d_model=2560, num_heads=32, num_kv_heads=8, d_ff=9728, tie_embeddings=True
    ),
    total=4.0,
    active=4.0,
    source="https://huggingface.co/Qwen/Qwen3-4B/blob/main/config.json",
  ),
  "Qwen3-30B-A3B": Published(
    dataclasses.replace(QWEN3_MOE, num_layers=48, d_model=2048, num_heads=32, d_ff=6144, d_ff_expert=768),
    total=30.5,
    active=3.3,
    source="https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json",
  ),
  "Qwen3-235B-A22B": Published(
    dataclasses.replace(QWEN3_MOE, num_layers=94, d_model=4096, num_heads=64, d_ff=12_288, d_ff_expert=1536),
    total=235.0,
    active=22.0,
    source="https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json",
  ),
  "GLM-4.5-Air": Published(
    dataclasses.replace(
      GLM,
      num_layers=46,
      d_model=4096,
      d_ff=10_944,
      num_experts=128,
      d_ff_expert=1408,
      d_ff_shared=1408,
      num_dense_layers=1,
      qk_norm=False,
    ),
    total=106.0,
    active=12.0,  # as published, without the embedding and the head
    source="https://huggingface.co/zai-org/GLM-4.5-Air/blob/main/config.json",
  ),
  "GLM-4.5": Published(
    dataclasses.replace(
      GLM,
      num_layers=92,
      d_model=5120,
      d_ff=12_288,
      num_experts=160,
      d_ff_expert=1536,
      d_ff_shared=1536,
      num_dense_layers=3,
      routed_scaling=2.5,
    ),
    total=355.0,
    active=32.0,
    source="https://huggingface.co/zai-org/GLM-4.5/blob/main/config.json",
  ),
  "GLM-5": Published(
    GLM5,
    total=744.0,
    active=40.0,  # as published, without the embedding and the head
    source="https://huggingface.co/zai-org/GLM-5/blob/main/config.json",
  ),
  "GLM-5.2": Published(
    dataclasses.replace(GLM5, indexer_types=GLM52_INDEXERS, rope_theta=8e6, max_positions=1_048_576),
    total=750.0,
    active=40.0,
    source="https://huggingface.co/zai-org/GLM-5.2/blob/main/config.json",
  ),
  "GLM-4.7-Flash": Published(
    dataclasses.replace(
      GLM5,
      num_layers=47,
      d_model=2048,
      num_heads=20,
      num_kv_heads=20,
      d_ff=10_240,
      num_experts=64,
      num_experts_per_token=4,
      d_ff_expert=1536,
      d_ff_shared=1536,
      num_dense_layers=1,
      routed_scaling=1.8,
      q_lora_rank=768,
      index_topk=0,
      index_num_heads=0,
      index_head_dim=0,
    ),
    total=30.0,
    active=3.6,  # the card rounds it down to 3
    source="https://huggingface.co/zai-org/GLM-4.7-Flash/blob/main/config.json",
  ),
  "DeepSeek-V3": Published(  # and R1
    DEEPSEEK,
    total=671.0,
    active=37.0,  # as published, without the embedding
    source="https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json",
  ),
  "Kimi-K2": Published(
    dataclasses.replace(
      DEEPSEEK,
      vocab_size=163_840,
      num_heads=64,
      num_kv_heads=64,
      num_experts=384,
      num_dense_layers=1,
      num_expert_groups=1,
      num_groups_per_token=1,
      routed_scaling=2.827,
      rope_theta=5e4,
      yarn=YarnConfig(32.0, 4096, beta_fast=1.0, attention_factor=1.0, mscale_all_dim=1.0),
      max_positions=131_072,
    ),
    total=1026.0,  # of its files; the card rounds it down to 1000
    active=32.0,
    source="https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json",
  ),
  "Qwen2.5-7B": Published(
    dataclasses.replace(QWEN25, vocab_size=152_064, d_model=3584, num_heads=28, num_kv_heads=4, d_ff=18_944),
    total=7.61,
    active=7.61,
    source="https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json",
  ),
  "R1-Distill-Qwen-1.5B": Published(
    dataclasses.replace(QWEN25, d_model=1536, num_heads=12, num_kv_heads=2, d_ff=8960, rope_theta=1e4),
    total=1.78,  # with a head of its own, which the 1.5 of its name do not count
    active=1.78,
    source="https://huggingface.co/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B/blob/main/config.json",
  ),
  "Llama-3.1-8B": Published(
    dataclasses.replace(LLAMA31, num_layers=32, d_model=4096, num_heads=32, d_ff=14_336),
    total=8.03,
    active=8.03,
    source="https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json",
  ),
  "Llama-3.3-70B": Published(
    dataclasses.replace(LLAMA31, num_layers=80, d_model=8192, num_heads=64, d_ff=28_672),
    total=70.6,
    active=70.6,
    source="https://huggingface.co/meta-llama/Llama-3.3-70B-Instruct/blob/main/config.json",
  ),
  "Mistral-7B-v0.3": Published(
    dataclasses.replace(
      LLAMA,
      vocab_size=32_768,
      num_layers=32,
      d_model=4096,
      num_heads=32,
      d_ff=14_336,
      rope_theta=1e6,
      max_positions=32_768,
    ),
    total=7.25,
    active=7.25,
    source="https://huggingface.co/mistralai/Mistral-7B-v0.3/blob/main/config.json",
  ),
  "Seed-OSS-36B": Published(
    dataclasses.replace(
      LLAMA,
      vocab_size=155_136,
      num_layers=64,
      d_model=5120,
      num_heads=80,
      d_ff=27_648,
      attention_bias=True,
      rope_theta=1e7,
      max_positions=524_288,
      rms_norm_eps=1e-6,
    ),
    total=36.0,
    active=36.0,
    source="https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct/blob/main/config.json",
  ),
}


def total_params(config: ModelConfig) -> int:
  """Counts the parameters of the policy; a tied head counts once, layers of multi-token prediction do not count."""
  return count_params(param_specs(config))


def active_params(config: ModelConfig) -> int:
  """Counts the parameters that one token meets: all but the experts not chosen, with embedding and head."""
  experts = {f"moe_layers/moe/{name}" for name in EXPERT_WEIGHTS}
  count = 0
  for path, spec in jax.tree_util.tree_leaves_with_path(param_specs(config)):
    size = math.prod(spec.shape)
    count += size * config.num_experts_per_token // config.num_experts if path_name(path) in experts else size
  return count


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bfloat16") -> int:
  """Returns the bytes of the sampler's cache per token: keys and values of all layers, or latents and index keys."""
  cache = jax.eval_shape(lambda: empty_cache(config, 1, 1, dtype))
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def size_table() -> str:
  """Returns a Markdown table of the published models: billions of parameters, KiB of cache per token, source."""
  rows = [
    "| Model | Total (B) | Active (B) | KV cache per token (KiB, bf16) | Configuration |",
    "|---|---|---|---|---|",
  ]
  for name, published in PUBLISHED.items():
    total, active = (count(published.model) / 1e9 for count in (total_params, active_params))
    cache = kv_bytes_per_token(published.model) / 1024
    rows.append(f"| {name} | {total:.2f} | {active:.2f} | {cache:.0f} | [config.json]({published.source}) |")
  return "\n".join(rows)
