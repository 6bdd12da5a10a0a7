"""Queries, keys and values of one row and one kv head, and the scores between them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOWEST = float(jnp.finfo(jnp.float32).min)  # the score of what must not be read; finite, as are differences from it


class Queries(NamedTuple):
  """Queries of one row that read one kv head, or a block of them.

  Attributes:
    q: [T, G, h], G heads of every token.
    segments: the tokens' segments, once for every head: XLA does not vectorise a mask of tokens on a CPU.
    index: likewise the tokens' indices in the row: each reads the keys of its segment up to this index.
  """

  q: Float[Array, "T G h"]
  segments: Int[Array, "T G"]
  index: Int[Array, "T G"]


class Keys(NamedTuple):
  """Keys and values of one row and kv head, or a block of them; the s-th key of a row has the index s.

  Attributes:
    k: [S, h].
    v: [S, w].
    segments: the tokens' segments.
  """

  k: Float[Array, "S h"]
  v: Float[Array, "S w"]
  segments: Int[Array, "S"]


def masked_scores(
  queries: Queries, keys: Keys, first: jax.Array | int, scale: float, *, by_key: bool = False
) -> Float[Array, "N S"]:
  """Scores of every query with the keys of a block, which begins with the key `first`; fp32. `by_key`: [S, N]."""
  index = first + jnp.arange(keys.k.shape[0], dtype=jnp.int32)
  q, query_axis, key_axis = queries.q.reshape(-1, queries.q.shape[-1]), int(by_key), 1 - int(by_key)

  # Heads of a token are rows of their own.
  of_queries = lambda numbers: jnp.expand_dims(numbers.reshape(-1), key_axis)
  of_keys = lambda numbers: jnp.expand_dims(numbers, query_axis)
  readable = (of_queries(queries.segments) == of_keys(keys.segments)) & (of_queries(queries.index) >= of_keys(index))

  left, right = (keys.k, q) if by_key else (q, keys.k)
  return jnp.where(readable, jnp.dot(left, right.T, preferred_element_type=jnp.float32) * scale, LOWEST)
