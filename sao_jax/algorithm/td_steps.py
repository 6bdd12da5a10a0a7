"""The steps of GAE: from one sampled token to the next, as the paper has it, or one of the variants that it compares.

    token                 a step per sampled token, across observations                       (arXiv 2607.07508)
    step_average          a step per turn; V of a turn is the mean of V over its tokens, all of which learn
    step_last             a step per turn; V of a turn is V before its last token, which alone learns
    through_observations  a step per token, observations too: a common fault, since nothing teaches V there
    segments              a step per sampled token, to the end of its segment alone     (CompactionRL, arXiv 2607.05378)

All of them are one recursion, over other tokens: a turn's step stands on the turn's last token, and its advantage is
then written on all of the turn. A turn is a run of sampled tokens, which an observation ends.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.algorithm import pieces, tokens
from sao_jax.config import AlgorithmConfig
from sao_jax.types import TrajectoryBatch


class Steps(NamedTuple):
  """The steps that the recursion of GAE runs over.

  Attributes:
    mask: the tokens that a step stands on.
    values: V before each step.
    rewards: of each step.
    turns: a number for each run of sampled tokens of a row, 0 elsewhere; None where a step is a token.
  """

  mask: Bool[Array, "B T"]
  values: Float[Array, "B T"]
  rewards: Float[Array, "B T"]
  turns: Int[Array, "B T"] | None = None

  def on_tokens(self, advantages: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The advantages of steps, on all tokens that a step is made of."""
    advantages = jnp.where(self.mask, advantages, 0.0)
    return advantages if self.turns is None else jax.vmap(tokens.totals)(advantages, self.turns)


def td_steps(config: AlgorithmConfig, batch: TrajectoryBatch, state_values: Float[Array, "B T"]) -> Steps:
  """The steps that `algorithm.gae` names, with V of the state after each token as the critic gives it."""
  sampled, values = tokens.sampled_tokens(batch), tokens.token_values(state_values, batch)
  if config.gae in ("token", "segments"):
    return Steps(sampled, values, batch.rewards)
  if config.gae == "through_observations":
    return Steps(_between_samples(batch, sampled), values, jnp.where(sampled, batch.rewards, 0.0))

  # Turns, whose sums stand on all of their tokens.
  turns, last = _turns(sampled), _turn_ends(sampled)
  over_turn = lambda x: jax.vmap(tokens.totals)(jnp.where(sampled, x, 0.0), turns)
  if config.gae == "step_average":
    values = over_turn(values) / jnp.maximum(over_turn(jnp.ones_like(values)), 1.0)
  return Steps(last, values, over_turn(batch.rewards), turns)


def valued_tokens(config: AlgorithmConfig, batch: TrajectoryBatch, trained: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
  """The tokens that the critic learns on: the trained ones, of which `step_last` has the last of each turn alone."""
  return trained & _turn_ends(tokens.sampled_tokens(batch)) if config.gae == "step_last" else trained


def lambda_length(config: AlgorithmConfig, batch: TrajectoryBatch, steps: Steps) -> Float[Array, "B T"]:
  """n of each token's trajectory, in λ = 1 - 1/(α n): its steps, or all of its tokens from the first sampled one on.

  The second counts observations and what follows the last sampled token, segment by segment, as some implementations
  do; for `through_observations` it is the natural one. A third is the number of steps of the token's segment.
  """
  if config.lambda_length == "segment":
    return jax.vmap(tokens.totals)(steps.mask, batch.segment_ids)
  if config.lambda_length == "response":
    return pieces.count_per_trajectory(batch, _response(batch, tokens.sampled_tokens(batch)))
  if config.gae == "through_observations":
    return pieces.count_per_trajectory(batch, tokens.sampled_tokens(batch))
  return pieces.count_per_trajectory(batch, steps.mask)


def _response(batch: TrajectoryBatch, sampled: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
  """True from the first sampled token of each segment to the segment's end."""
  segments = batch.segment_ids
  so_far = jax.vmap(lambda mask, ids: tokens.affine_scan(tokens.starts(ids), mask))(sampled, segments)
  return (so_far > 0.0) & (segments > 0)


def _between_samples(batch: TrajectoryBatch, sampled: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
  """True from the first to the last sampled token of each segment."""
  left = jax.vmap(lambda mask, ids: tokens.affine_scan(tokens.ends(ids), mask, reverse=True))(
    sampled, batch.segment_ids
  )
  return _response(batch, sampled) & (left > 0.0)


def _turn_ends(sampled: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
  """True on the last token of each run of sampled tokens. Segments begin with a token that is none."""
  following = jnp.concatenate([sampled[:, 1:], jnp.zeros_like(sampled[:, :1])], axis=1)
  return sampled & ~following


def _turns(sampled: Bool[Array, "B T"]) -> Int[Array, "B T"]:
  """1, 2, ... for the runs of sampled tokens of each row, 0 elsewhere."""
  before = jnp.concatenate([jnp.zeros_like(sampled[:, :1]), sampled[:, :-1]], axis=1)
  return jnp.where(sampled, jnp.cumsum(sampled & ~before, axis=1), 0)
