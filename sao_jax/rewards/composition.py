"""Rewards made of parts: quality times style, and a penalty for answers that come close to the longest allowed."""

from __future__ import annotations

from sao_jax.errors import ConfigError
from sao_jax.rewards.scalar import check_reward


def quality_times_style(quality: float, style: float, environment: str) -> tuple[float, dict[str, float]]:
  """Multiplies the reward of an answer by the degree to which its style is the wanted one.

  A wrong answer earns nothing by its style, nor a right one in a style that is not wanted at all.

  Args:
    quality: reward of the answer, at least 0.
    style: factor in [0, 1].
    environment: named by failures.

  Returns:
    The reward, and its parts for `StepResult.info`.

  Raises:
    GraderFailure: for parts that are no finite numbers, or outside of their range; two negative parts would pay.

  >>> quality_times_style(1.0, 0.25, "letters")
  (0.25, {'reward_quality': 1.0, 'reward_style': 0.25})
  """
  quality, style = check_reward(quality, environment), check_reward(style, environment)
  if quality < 0.0 or not 0.0 <= style <= 1.0:
    from sao_jax.episode import GraderFailure  # here, as in `scalar`

    raise GraderFailure(environment, f"quality {quality:g} must be at least 0, and style {style:g} within 0 and 1")
  return quality * style, {"reward_quality": quality, "reward_style": style}


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
  """Returns the soft penalty of DAPO (arXiv 2503.14476, equation 13), to be added to a reward.

  With n = `length`, L = `max_length` and C = `cache`:

      0                 n <= L - C
      (L - C - n) / C   L - C < n <= L
      -1                n > L

  Args:
    length: number of tokens that were sampled.
    max_length: tokens of an answer, from which on the penalty is whole.
    cache: number of tokens before that over which it grows.

  Raises:
    ConfigError: naming `cache`, unless 0 < cache <= max_length.

  >>> [overlong_penalty(length, max_length=20, cache=8) for length in (12, 14, 20, 21)]
  [0.0, -0.25, -1.0, -1.0]
  """
  if not 0 < cache <= max_length:
    raise ConfigError("cache", f"{cache} of {max_length} tokens is no stretch.", "Use 1 to max_length.")
  over = length - (max_length - cache)
  return -min(over / cache, 1.0) if over > 0 else 0.0
