"""The choice of the cache's layout and dtype, by configuration and platform."""

from __future__ import annotations

from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.page_programs import PagePrograms
from sao_jax.sampler.programs import Programs, Sizes
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.slot_programs import SlotPrograms


def make_programs(model: ModelConfig, sampler: SamplerConfig, layout: Layout, keep_experts: bool = False) -> Programs:
  """The programs of an engine on the devices of `layout`, which need not be here as long as nothing runs.

  Raises:
    ConfigError: the pages hold no context, or do not split over the mesh.
  """
  rule = SamplingRule(top_p=sampler.top_p, top_k=sampler.top_k)
  dtype = choose_dtype(sampler, layout.platform)
  sizes = Sizes(model, sampler, rule, dtype, keep_experts, layout)
  return {"slots": SlotPrograms, "pages": PagePrograms}[choose_layout(sampler, layout.platform)](sizes)


def choose_layout(config: SamplerConfig, platform: str) -> str:
  """The layout of the cache: with "auto" pages on a TPU, and slots elsewhere, where they are faster."""
  if config.cache_layout == "auto":
    return "pages" if platform == "tpu" else "slots"
  return config.cache_layout


def choose_dtype(config: SamplerConfig, platform: str) -> str:
  """The dtype of the cache: with "auto" bfloat16 on a TPU, and float32 elsewhere."""
  if config.cache_dtype == "auto":
    return "bfloat16" if platform == "tpu" else "float32"
  return config.cache_dtype
