"""Trajectories that lie in several pieces: what runs along a trajectory goes on from one piece to the next.

A scan along a row takes every piece for a trajectory of its own. The functions here join the pieces on a second level:
one number of each piece is read from the rows, these [P] numbers are scanned like the tokens of a row, with
`Pieces.trajectory` as ids, and the result is written on all tokens of each piece. So nothing of the size of the batch
crosses devices. A batch without pieces is computed by the rows alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from sao_jax.algorithm import tokens
from sao_jax.types import Pieces, TrajectoryBatch


def trajectory_totals(x: Shaped[Array, "B T"], batch: TrajectoryBatch) -> Float[Array, "B T"]:
  """The sum of `x` over each token's trajectory, written on every token of it. fp32."""
  sums = jax.vmap(tokens.totals)(x, batch.trajectory_ids)
  if batch.pieces is None:
    return sums
  return _on_tokens(tokens.totals(_of_pieces(sums, batch.pieces), batch.pieces.trajectory), batch.pieces, sums)


def count_per_trajectory(batch: TrajectoryBatch, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
  """The number of tokens in `mask` of each token's trajectory; with `tokens.sampled_tokens` it is n."""
  return trajectory_totals(mask, batch)


def returns(batch: TrajectoryBatch) -> Float[Array, "B T"]:
  """The undiscounted return of each token's trajectory: the sum of the rewards on its sampled tokens."""
  return trajectory_totals(jnp.where(tokens.sampled_tokens(batch), batch.rewards, 0.0), batch)


def first_tokens(batch: TrajectoryBatch) -> Bool[Array, "B T"]:
  """True on the first token of every trajectory."""
  first = jax.vmap(tokens.starts)(batch.trajectory_ids) & (batch.trajectory_ids > 0)
  if batch.pieces is None:
    return first
  return first & _on_tokens(tokens.starts(batch.pieces.trajectory), batch.pieces, jnp.ones_like(first))


def last_sampled_tokens(batch: TrajectoryBatch, sampled: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
  """True on the last of the `sampled` tokens of every trajectory that has one."""
  last = jax.vmap(tokens.last_sampled)(sampled, batch.trajectory_ids)
  if batch.pieces is None:
    return last
  has_sampled = _of_pieces(jax.vmap(tokens.totals)(sampled, batch.trajectory_ids), batch.pieces) > 0.0
  final = tokens.last_sampled(has_sampled, batch.pieces.trajectory)
  return last & _on_tokens(final, batch.pieces, jnp.ones_like(last))


def join_returns(
  own: Float[Array, "B T"],
  values: Float[Array, "B T"],
  sampled: Bool[Array, "B T"],
  batch: TrajectoryBatch,
  *,
  one_minus_lam: Float[Array, "B T"],
  gamma: float,
  end_values: Float[Array, "B T"],
) -> Float[Array, "B T"]:
  """λ-returns of whole trajectories, from those of pieces behind which nothing comes.

  Behind the last sampled token of a piece comes, with V and G at the first sampled token of the pieces that follow,

      X = γ ((1 - λ) V + λ G)          X = γ times the end value behind the last one of the trajectory

  and (γλ)^m of it reaches a token before which m sampled tokens of its piece are left.

  Args:
    own: G of every sampled token as if its piece were all there is, and truly ended.
    values: V of the state before each token.
    sampled: the tokens that returns run over.
    batch: packed rows, with pieces.
    one_minus_lam: 1 - λ for the token's trajectory.
    gamma: discount per sampled token.
    end_values: V behind the end of the token's piece, of which the trajectory's last is read; 0 at a true end.
  """
  pieces, ids = batch.pieces, batch.trajectory_ids
  decay_complement = (1.0 - gamma) + gamma * one_minus_lam  # 1 - γλ

  # Of each piece: its number of sampled tokens, and V and G at the first one.
  remaining = jax.vmap(lambda mask, ids: tokens.affine_scan(tokens.ends(ids), mask, reverse=True))(sampled, ids)
  number = _of_pieces(remaining, pieces)
  at_first = jax.vmap(tokens.at_first_sampled)
  value, own_return = (_of_pieces(at_first(x, sampled, ids), pieces) for x in (values, own))
  one_minus_lam, complement, end_value = (_of_pieces(x, pieces) for x in (one_minus_lam, decay_complement, end_values))

  # What enters behind it, but for G.
  has_sampled = number > 0.0
  final = tokens.last_sampled(has_sampled, pieces.trajectory)
  next_value = tokens.next_sampled(value, has_sampled)
  inflow = gamma * jnp.where(final, tokens.at_end(end_value, pieces.trajectory), one_minus_lam * next_value)

  # G at its first sampled token, from the last piece to the first: own + (γλ)^(n-1) (inflow + γλ G of the next one).
  through = jnp.where(final, 1.0, 1.0 - power(complement, number))
  offset = own_return + power(complement, number - 1.0) * inflow
  joined = tokens.affine_scan(jnp.where(has_sampled, through, 0.0), jnp.where(has_sampled, offset, 0.0), reverse=True)

  # X, on all tokens of the piece.
  behind = inflow + jnp.where(final, 0.0, (1.0 - complement) * tokens.next_sampled(joined, has_sampled))
  reaching = power(decay_complement, remaining - 1.0) * _on_tokens(behind, pieces, jnp.zeros_like(own))
  return jnp.where(sampled, own + reaching, 0.0)


def power(complement: Float[Array, "*shape"], exponent: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """(1 - complement)^exponent for exponents >= 0, with all the digits of a small complement; 1 below."""
  return jnp.where(exponent > 0.0, jnp.exp(exponent * jnp.log1p(-complement)), 1.0)


def _of_pieces(x: Shaped[Array, "B T"], pieces: Pieces) -> Float[Array, "P"]:
  """`x` at the first token of every piece, 0 where there is none. fp32."""
  return jnp.where(pieces.trajectory > 0, jnp.asarray(x, jnp.float32)[pieces.row, pieces.column], 0.0)


def _on_tokens(x: Shaped[Array, "P"], pieces: Pieces, otherwise: Shaped[Array, "B T"]) -> Shaped[Array, "B T"]:
  """`x` of a piece on all of its tokens; `otherwise` on tokens of trajectories in one piece."""
  return jnp.where(pieces.ids > 0, x[jnp.maximum(pieces.ids - 1, 0)], otherwise)
