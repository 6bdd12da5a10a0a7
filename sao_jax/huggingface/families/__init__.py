"""The families of published models that can be read and written, and the choice of one for a folder or a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.families import glm4_moe, glm_moe_dsa, qwen3, qwen3_moe
from sao_jax.huggingface.families.family import DEFAULT_MODEL, Family, shape_differences

FAMILIES = (qwen3.FAMILY, qwen3_moe.FAMILY, glm4_moe.FAMILY, glm_moe_dsa.FAMILY)


def family_of_fields(fields: Mapping[str, Any]) -> Family:
  """Returns the family that a config.json belongs to. ConfigError when its model_type is unknown."""
  for family in FAMILIES:
    if family.model_type == fields.get("model_type"):
      return family
  known = ", ".join(family.model_type for family in FAMILIES)
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
