"""Rewards are finite scalars; everything else is a failure of the grader, never a silent 0."""

from __future__ import annotations

import math
import numbers
from typing import Any

LARGEST = 1e15  # of a reward: critics square the errors of their sums in fp32, which ends at 3.4e38


def check_reward(reward: Any, environment: str) -> float:
  """Returns the reward as a Python float.

  Accepts Python and NumPy real numbers and zero-dimensional NumPy arrays of them.

  Raises:
    GraderFailure: for None, NaN, infinities, numbers that fp32 cannot square, booleans, strings, complex numbers,
      sequences and arrays.
  """
  if getattr(reward, "shape", None) == () and hasattr(reward, "item"):
    reward = reward.item()
  if isinstance(reward, bool) or not isinstance(reward, numbers.Real):
    raise _failure(environment, f"got {type(reward).__name__} {reward!r:.80}")
  try:
    value = float(reward)
  except OverflowError:
    value = math.inf
  if not math.isfinite(value):
    raise _failure(environment, f"got {value}")
  if abs(value) > LARGEST:
    raise _failure(environment, f"of at most {LARGEST:g}, got {value}")
  return value


def _failure(environment: str, found: str) -> Exception:
  from sao_jax.episode import GraderFailure  # here, so that workers, which check rewards too, start without NumPy

  return GraderFailure(environment, f"the reward must be one finite number, {found}")
