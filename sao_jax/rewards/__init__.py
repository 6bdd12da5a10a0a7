"""Verifiers of answers, the check that a reward is one finite number, and processes for graders that compute.

An answer's text and the right answer enter; one finite float leaves, or a `GraderFailure`. Nothing that a policy wrote
is ever evaluated, and a grader that takes too long is killed. This room never imports jax.
"""

from __future__ import annotations

from typing import Any

from sao_jax.rewards.exact_match import integer_match, parse_integer
from sao_jax.rewards.scalar import check_reward

__all__ = ["GraderPool", "check_reward", "integer_match", "parse_integer"]


def __getattr__(name: str) -> Any:
  # Imported when it is asked for: its worker processes import this room too, and must start without NumPy.
  if name == "GraderPool":
    from sao_jax.rewards.grader_pool import GraderPool

    return GraderPool
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
