"""Ragged queries over pages read what a plain loop over sequences and positions reads."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.sampler import paged_attention
from sao_jax.sampler.kernel_limits import check_kernel
from sao_jax.sampler.paged_attention import ragged_paged_attention

PAGE, PAGES, PER_SEQUENCE = 4, 24, 5


def plain(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale):
  """The same in numpy: one sequence, one query, one head after the other."""
  out, group = np.zeros_like(q), q.shape[1] // (kv_pages.shape[2] // 2)
  for row in range(num_seqs[0]):
    cache = kv_pages[page_indices[row]].reshape(-1, *kv_pages.shape[2:])
    first, end = cu_q_lens[row], cu_q_lens[row + 1]
    for token in range(first, end):
      readable = cache[: kv_lens[row] - (end - token) + 1]
      for head in range(q.shape[1]):
        keys, values = readable[:, 2 * (head // group)], readable[:, 2 * (head // group) + 1]
        scores = keys @ q[token, head] * sm_scale
        weights = np.exp(scores - scores.max())
        out[token, head] = weights @ values / weights.sum()
  return out


@functools.cache
def compiled():
  return jax.jit(functools.partial(ragged_paged_attention, sm_scale=0.4))


def arguments(seed, queries, pasts, num_tokens, rows, kv_heads, group, dim=8):
  rng = np.random.default_rng(seed)
  cu_q_lens = np.full((rows + 1,), 10**6, np.int32)  # what lies behind the last sequence is not read
  cu_q_lens[: len(queries) + 1] = np.cumsum([0, *queries])
  kv_lens = np.full((rows,), -7, np.int32)
  kv_lens[: len(queries)] = np.add(queries, pasts)
  kv_pages = rng.normal(size=(PAGES, PAGE, 2 * kv_heads, dim)).astype(np.float32)
  page_indices = rng.permutation(PAGES)[: rows * PER_SEQUENCE].reshape(rows, -1).astype(np.int32)
  # Positions that no sequence has may hold anything.
  for row in range(len(queries)):
    for position in range(kv_lens[row], PAGE * PER_SEQUENCE):
      kv_pages[page_indices[row, position // PAGE], position % PAGE] = np.nan
  q = rng.normal(size=(num_tokens, kv_heads * group, dim)).astype(np.float32)
  return q, kv_pages, kv_lens, page_indices, cu_q_lens, np.array([len(queries)], np.int32)


@hypothesis.given(
  seed=st.integers(0, 99),
  sequences=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 14)), min_size=1, max_size=4),
  heads=st.sampled_from([(1, 4), (2, 2)]),
  shape=st.sampled_from([(24, 4), (16, 4), (24, 5)]),
)
def test_queries_read_their_own_sequence_up_to_themselves(seed, sequences, heads, shape):
  """Mixed numbers of queries; more tokens than four per row take the other way through the function."""
  queries, pasts = zip(*sequences, strict=True)
  hypothesis.assume(sum(queries) <= shape[0] and shape[1] * PER_SEQUENCE <= PAGES + 1)
  given = arguments(seed, queries, pasts, shape[0], min(shape[1], 4), *heads)
  out = compiled()(*given)
  np.testing.assert_allclose(out, plain(*given, sm_scale=0.4), atol=1e-5)


def test_a_long_cache_is_read_in_steps(monkeypatch):
  monkeypatch.setattr(paged_attention, "POSITIONS_AT_A_TIME", 8)
  for num_tokens in (8, 24):  # one way and the other
    given = arguments(0, (3, 1, 2), (14, 19, 0), num_tokens, 4, 2, 2)
    out = jax.jit(functools.partial(ragged_paged_attention, sm_scale=0.4))(*given)
    np.testing.assert_allclose(out, plain(*given, sm_scale=0.4), atol=1e-5)


def test_the_reference_of_the_tpus_kernel_has_the_same_arguments_and_results():
  """jax's own, beside the kernel; the kernel itself runs on a TPU only, interpret mode does not know all of it."""
  kernel = pytest.importorskip("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
  given = tuple(map(jnp.asarray, arguments(1, (5, 1), (9, 3), 6, 2, 1, 2)))
  expected = kernel.ref_ragged_paged_attention(*given, sm_scale=0.4)
  np.testing.assert_allclose(compiled()(*given), expected, atol=1e-5)


@pytest.mark.parametrize(
  ("sizes", "field", "words"),
  [
    ((128, 1024, 24, 4, 128, 2), None, ""),
    ((16, 8192, 24, 4, 128, 2), None, ""),
    ((4096, 32, 24, 4, 128, 2), None, ""),
    ((8, 16384, 24, 4, 128, 2), "sampler.page_size", "use at least 16"),
    ((16, 8192, 96, 4, 128, 2), "sampler.page_size", "use pages of 64 tokens or more"),
    ((16384, 8, 4, 4, 128, 2), "sampler.page_size", "use at most 1024"),
    ((128, 1024, 24, 3, 128, 2), "model.num_kv_heads", "sampler.mesh.tensor"),
  ],
)
def test_sizes_that_the_kernel_does_not_take_are_refused_with_a_remedy(sizes, field, words):
  """The first three, and what is refused for its table or its heads, were tried with the compiler for v5p."""
  refused = check_kernel(*sizes)
  assert (refused and refused.field) == field and words in str(refused)
