"""LoRA's factors at the start of a phase: fresh ones where a checkpoint has none, a check of their scale otherwise."""

from __future__ import annotations

import numpy as np

from sao_jax.config import RunConfig
from sao_jax.errors import ConfigError
from sao_jax.learner.setup import Learner, init_sharded
from sao_jax.models.lora import lora_scale
from sao_jax.types import PyTree


def add_fresh_lora(learner: Learner, params: PyTree, seed: int) -> PyTree:
  """Adds LoRA's initial factors to policy parameters without any, if the learner trains them."""
  if "lora" in params or "lora" not in learner.policy.specs:
    return params
  return params | init_sharded({"lora": learner.policy.specs["lora"]}, learner.layout, seed)


def check_lora_scale(config: RunConfig, params: PyTree) -> None:
  """Refuses policy parameters whose factors were trained with another scale than the configuration has.

  Raises:
    ConfigError: naming the alpha that they belong to.
  """
  lora = config.model.lora
  if "lora" in params and float(params["lora"]["scale"]) != np.float32(lora_scale(lora)):
    alpha = float(params["lora"]["scale"]) * lora.rank
    raise ConfigError(
      "model.lora.alpha",
      f"{lora.alpha} was set, the factors in the checkpoint belong to {alpha:g}.",
      f"Set model.lora.alpha={alpha:g}.",
    )
