"""Exactly one finite scalar per episode; everything else is a failure of the grader, never a silent 0."""

from __future__ import annotations

import math
import numbers
from typing import Any

from sao_jax.episode import GraderFailure


def check_reward(reward: Any, environment: str) -> float:
  """Returns the reward as a Python float.

  Accepts Python and NumPy real numbers and zero-dimensional NumPy arrays of them.

  Raises:
    GraderFailure: for None, NaN, infinities, booleans, strings, complex numbers, sequences and arrays.
  """
  if getattr(reward, "shape", None) == () and hasattr(reward, "item"):
    reward = reward.item()
  if isinstance(reward, bool) or not isinstance(reward, numbers.Real):
    raise GraderFailure(
      environment, f"the reward must be one finite number, got {type(reward).__name__} {reward!r:.80}"
    )
  try:
    value = float(reward)
  except OverflowError:
    value = math.inf
  if not math.isfinite(value):
    raise GraderFailure(environment, f"the reward must be one finite number, got {value}")
  return value
