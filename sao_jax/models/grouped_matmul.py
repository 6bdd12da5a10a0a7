"""placeholder simple version"""

from __future__ import annotations

import jax.numpy as jnp


def grouped_matmul(lhs, rhs, group_sizes, implementation="auto"):
  ends = jnp.cumsum(group_sizes)
  rows = jnp.arange(lhs.shape[0], dtype=jnp.int32)
  out = jnp.zeros((lhs.shape[0], rhs.shape[2]), lhs.dtype)
  for e in range(rhs.shape[0]):
    inside = (rows < ends[e]) & (rows >= ends[e] - group_sizes[e])
    out = out + jnp.where(inside[:, None], lhs @ rhs[e], 0)
  return out
