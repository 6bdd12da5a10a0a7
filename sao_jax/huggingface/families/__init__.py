"""The families of published models that can be read and written, and the choice of one for a folder or a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import (
  deepseek_v3,
  glm4_moe,
  glm4_moe_lite,
  glm_moe_dsa,
  llama,
  mistral,
  qwen2,
  qwen3,
  qwen3_moe,
  seed_oss,
)
from sao_jax.huggingface.families.family import DEFAULT_MODEL, Family, shape_differences

# Where several can hold a model, the first of them writes it.
FAMILIES = (
  *(qwen3.FAMILY, qwen3_moe.FAMILY, qwen2.FAMILY, llama.FAMILY, mistral.FAMILY, seed_oss.FAMILY, glm4_moe.FAMILY),
  *(glm_moe_dsa.FAMILY, deepseek_v3.FAMILY, glm4_moe_lite.FAMILY),
)


def family_of_fields(fields: Mapping[str, Any]) -> Family:
  """Returns the family that a config.json belongs to. ConfigError when its model_type is unknown."""
  for family in FAMILIES:
    if fields.get("model_type") in (family.model_type, *family.other_types):
      return family
  known = ", ".join(name for family in FAMILIES for name in (family.model_type, *family.other_types))
  raise ConfigError("config.json model_type", f"{fields.get('model_type')!r} is not implemented.", f"Use {known}.")


def family_of_model(config: ModelConfig) -> Family:
  """Returns the first family whose config.json can express this shape. ConfigError, with reasons, when none can."""
  reasons = []
  for family in FAMILIES:
    try:
      differences = "; ".join(shape_differences(config, family.model_config(family.write(config))))
    except ConfigError as error:  # the family refuses what it wrote: it has no such model
      differences = error.problem
    if not differences:
      return family
    reasons.append(f"{family.model_type}: {differences}")
  raise ConfigError(
    "model",
    "no family's format can hold this model.\n    " + "\n    ".join(reasons),
    "Train a shape that one of them has.",
  )


def from_hf_config(fields: Mapping[str, Any], model: ModelConfig = DEFAULT_MODEL) -> ModelConfig:
  """Returns `model` with the shape that a config.json gives; choices of a run (dtypes, remat) stay.

  Raises:
    ConfigError: listing every field that is missing, unknown, or has a value that is not implemented.
  """
  return family_of_fields(fields).model_config(fields, model)
