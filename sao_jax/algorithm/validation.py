"""Refuses algorithm settings that cannot work, before any work is done."""

from __future__ import annotations

import math

from sao_jax.config import AlgorithmConfig
from sao_jax.errors import ConfigError


def check_algorithm_config(config: AlgorithmConfig) -> None:
  """Raises ConfigError for the first setting that is out of range or contradicts another."""

  def check(field: str, valid: bool, rule: str) -> None:
    if not valid:
      raise ConfigError(f"algorithm.{field}", f"{getattr(config, field)!r} cannot work.", f"Set it to {rule}.")

  check("epsilon_low", 0.0 < config.epsilon_low <= 1.0, "a delta in (0, 1]; tokens with ratio <= 1 - delta are dropped")
  check("epsilon_high", config.epsilon_high > 0.0, "a delta > 0; tokens with ratio >= 1 + delta are dropped")
  check("gamma", 0.0 <= config.gamma <= 1.0, "a discount in [0, 1]")
  check("alpha", 1.0 <= config.alpha < math.inf, "a number >= 1; smaller ones make lambda = 1 - 1/(alpha n) negative")
  check("critic_lambda", 0.0 <= config.critic_lambda <= 1.0, "a number in [0, 1]")
  check("value_updates", config.value_updates >= 1, "at least 1 critic update per step")
  check("advantage_values", config.advantage_values in ("post", "pre"), "'post' or 'pre'")
  check("truncation", config.truncation in ("zero", "bootstrap", "mask"), "'zero', 'bootstrap' or 'mask'")
  check("value_head", config.value_head in ("scalar", "hl_gauss"), "'scalar' or 'hl_gauss'")
  check("value_clip", config.value_clip >= 0.0, "a range >= 0, where 0 turns the clip off")
  check("micro_batches", config.micro_batches >= 1, "at least 1")
  if config.value_head == "hl_gauss":
    check("value_clip", config.value_clip == 0.0, "0 with value_head='hl_gauss', which has no squared error to clip")
    check("value_bins", config.value_bins >= 6, "at least 6 bins")
    check("value_max", config.value_min < config.value_max, "more than value_min; together the range of the returns")
