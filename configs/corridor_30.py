"""Corridors of thirty doors on one core."""

from __future__ import annotations

from configs.corridor import corridor_config
from sao_jax.config import RunConfig
from sao_jax.environments.corridor import Corridor


def get_config() -> RunConfig:
  """Thirty doors."""
  return corridor_config(Corridor(horizon=30))
