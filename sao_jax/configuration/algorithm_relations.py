"""The algorithm's fields: a head for values, advantages and what they are compared with, segments."""

from __future__ import annotations

from collections.abc import Iterator

from sao_jax.config import AlgorithmConfig, RunConfig
from sao_jax.errors import ConfigError


def algorithm_relations(config: RunConfig) -> Iterator[ConfigError]:
  """Yields the errors of "algorithm" that need neither the model nor the devices, and of the groups that it wants."""
  yield from _value_head(config.algorithm)
  yield from _segments(config.algorithm)
  yield from _advantage(config)


def _value_head(algorithm: AlgorithmConfig) -> Iterator[ConfigError]:
  if algorithm.value_head != "hl_gauss":
    return
  if algorithm.value_clip:
    yield ConfigError(
      "algorithm.value_clip",
      f"{algorithm.value_clip} with value_head='hl_gauss', which has no squared error to clip.",
      "Set it to 0, or use algorithm.value_head=scalar.",
    )

  # The histogram has bins enough, over a range.
  if algorithm.value_bins < 6:
    yield ConfigError(
      "algorithm.value_bins", f"{algorithm.value_bins} bins are too few for a histogram.", "Set it to at least 6."
    )
  if not algorithm.value_min < algorithm.value_max:
    yield ConfigError(
      "algorithm.value_max",
      f"returns from {algorithm.value_min} to {algorithm.value_max} are no range.",
      "Set it to more than algorithm.value_min; together they are the range of the returns.",
    )


def _segments(algorithm: AlgorithmConfig) -> Iterator[ConfigError]:
  if algorithm.lambda_length == "segment" and algorithm.gae != "segments":
    yield ConfigError(
      "algorithm.lambda_length",
      f"'segment' gives each segment a lambda of its own, and algorithm.gae={algorithm.gae!r} goes on across segments.",
      "Use algorithm.gae=segments, or algorithm.lambda_length=steps.",
    )


def _advantage(config: RunConfig) -> Iterator[ConfigError]:
  algorithm, rollout = config.algorithm, config.rollout
  # A batch is made of whole groups.
  if rollout.batch_size % rollout.group_size:
    yield ConfigError(
      "rollout.batch_size",
      f"{rollout.batch_size} trajectories do not divide into groups of {rollout.group_size}.",
      "Make rollout.batch_size a multiple of rollout.group_size.",
    )
  # Advantages within groups need groups, and are of unit size already.
  if algorithm.needs_groups and rollout.group_size < 2:
    yield ConfigError(
      "rollout.group_size",
      f"group-relative advantages compare the rollouts of a prompt, and there is {rollout.group_size} of each.",
      "Set rollout.group_size to 2 or more, as in 8, or use algorithm.advantage=sao.",
    )
  if algorithm.needs_groups and algorithm.whitens():
    yield ConfigError(
      "algorithm.whiten_advantages",
      f"algorithm.advantage={algorithm.advantage!r} compares within groups; whitening would give those of equal "
      "rewards an advantage.",
      "Leave algorithm.whiten_advantages at auto, or set it to False.",
    )

  if rollout.filter_equal_groups and not algorithm.needs_groups:
    yield ConfigError(
      "rollout.filter_equal_groups",
      f"algorithm.advantage={algorithm.advantage!r} compares no rollouts within groups.",
      "Set it to False, or use algorithm.advantage=grpo.",
    )

  # Some methods have no critic.
  if algorithm.needs_critic:
    return
  if algorithm.critic_warmup_steps:
    yield ConfigError(
      "algorithm.critic_warmup_steps",
      f"{algorithm.critic_warmup_steps} critic-only steps, and algorithm.advantage={algorithm.advantage!r} has no "
      "critic.",
      "Pass --config.algorithm.critic_warmup_steps=0.",
    )
  if algorithm.truncation == "bootstrap":
    yield ConfigError(
      "algorithm.truncation",
      "'bootstrap' continues a cut trajectory with the critic's value, and "
      f"algorithm.advantage={algorithm.advantage!r} has no critic.",
      "Use algorithm.truncation='zero' or 'mask'.",
    )
