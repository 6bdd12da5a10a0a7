"""Scans over the tokens of one packed row. All are instances of one associative operator.

The operator composes affine maps y -> d + (1 - u) y, written with the complement u of the coefficient. That is exact
where it matters: u = 1 stops at a boundary, u = 0 passes an observation through, and a decay of 1 - 1/(1.5 n) keeps all
the digits of 1/(1.5 n), of which the decay itself, rounded next to 1, has lost half for n above 10^4. Associativity
means that a row may be cut anywhere, so it also composes across the shards of a sequence-parallel mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

AffineMap = tuple[Array, Array]  # (u, d)


def compose(inner: AffineMap, outer: AffineMap) -> AffineMap:
  """The map y -> outer(inner(y)), for maps y -> d + (1 - u) y given as (u, d)."""
  (inner_u, inner_d), (outer_u, outer_d) = inner, outer
  return outer_u + (1.0 - outer_u) * inner_u, outer_d + (1.0 - outer_u) * inner_d


def affine_scan(
  complement: Shaped[Array, "T"], offset: Shaped[Array, "T"], *, reverse: bool = False
) -> Float[Array, "T"]:
  """y[t] = offset[t] + (1 - complement[t]) y[t-1], or y[t+1] with `reverse`, starting from 0. fp32; True counts as 1.

  By doubling: after step i, entry t holds the composition of the 2^i maps that end at t. Its ceil(log2 T) steps are
  elementwise and shift by a constant; `jax.lax.associative_scan` does less arithmetic but compiles three times longer.
  """
  u, d = jnp.asarray(complement, jnp.float32), jnp.asarray(offset, jnp.float32)
  zero = jnp.zeros((), jnp.float32)  # (0, 0) is the identity map
  reach = 1
  while reach < u.shape[0]:
    padding = [(-reach, reach, 0) if reverse else (reach, -reach, 0)]
    u, d = compose((jax.lax.pad(u, zero, padding), jax.lax.pad(d, zero, padding)), (u, d))
    reach *= 2
  return d


def segment_starts(segment_ids: Int[Array, "T"]) -> Bool[Array, "T"]:
  """True on the first token of every segment of a row (and of its padding)."""
  return jnp.concatenate([jnp.ones(1, jnp.bool_), segment_ids[1:] != segment_ids[:-1]])


def segment_ends(segment_ids: Int[Array, "T"]) -> Bool[Array, "T"]:
  """True on the last token of every segment of a row (and of its padding)."""
  return jnp.concatenate([segment_ids[1:] != segment_ids[:-1], jnp.ones(1, jnp.bool_)])


def segment_totals(x: Shaped[Array, "T"], segment_ids: Int[Array, "T"]) -> Float[Array, "T"]:
  """The sum of `x` over the segment of each token, written on every one of its tokens. fp32."""
  x = jnp.asarray(x, jnp.float32)
  up_to_here = affine_scan(segment_starts(segment_ids), x)
  from_here_on = affine_scan(segment_ends(segment_ids), x, reverse=True)
  return up_to_here + from_here_on - x


def at_segment_end(x: Float[Array, "T"], segment_ids: Int[Array, "T"]) -> Float[Array, "T"]:
  """`x` at the last token of each token's segment. fp32."""
  ends = segment_ends(segment_ids)
  return affine_scan(ends, jnp.where(ends, x, 0.0), reverse=True)


def last_sampled(action_mask: Bool[Array, "T"], segment_ids: Int[Array, "T"]) -> Bool[Array, "T"]:
  """True on the last sampled token of every segment that has one. It may be followed by observations."""
  remaining = affine_scan(segment_ends(segment_ids), action_mask, reverse=True)
  return action_mask & (remaining == 1.0)


def next_sampled(x: Float[Array, "T"], action_mask: Bool[Array, "T"]) -> Float[Array, "T"]:
  """`x` at the first sampled token after each position, across any observations (and segments); 0 behind the last."""
  from_here_on = affine_scan(action_mask, jnp.where(action_mask, x, 0.0), reverse=True)
  return jnp.concatenate([from_here_on[1:], jnp.zeros(1, jnp.float32)])


def before_token(x: Float[Array, "T *rest"], segment_ids: Int[Array, "T"]) -> Float[Array, "T *rest"]:
  """From state-aligned (entry t follows token t) to token-aligned (entry t precedes token t); 0 on first tokens."""
  shifted = jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
  starts = segment_starts(segment_ids).reshape(-1, *(1,) * (x.ndim - 1))
  return jnp.where(starts, jnp.zeros_like(shifted), shifted)
