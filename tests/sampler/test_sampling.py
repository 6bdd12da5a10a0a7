"""Sampling rules: the distribution, the recorded log-probabilities, the random numbers (cases L2-L4, L6, A15)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from sao_jax.sampler import sampling
from sao_jax.sampler.sampling import SamplingRule, draw, sample_tokens, slot_uniforms

FREE = SamplingRule()
sample = jax.jit(jaxtyped(typechecker=beartype)(sample_tokens), static_argnames="rule")


@functools.cache
def grid(rows=400):
  """Uniforms that fill [0, 1)² evenly."""
  side = np.arange(rows, dtype=np.float32) / rows
  return jnp.asarray(np.stack([side, (side * 17.77) % 1], axis=1), jnp.float32)


def sample_rows(logits, temperature=1.0, rule=FREE, rows=400):
  logits = jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1))
  tokens, logprobs = sample(logits, grid(rows), jnp.full((rows,), temperature, jnp.float32), rule)
  return np.asarray(tokens), np.asarray(logprobs)


@pytest.mark.parametrize(
  ("logits", "temperature", "expected"),
  [
    ([2.0, 0.0], 0.5, -0.01815),  # L2
    ([2.0, 1.0, 0.0], 0.5, -0.14293),  # L3: logits are divided, not log-probs
    ([20.0, 19.9], 1.0, -0.64440),  # L6: fp32, bf16 would give -0.6326
    ([2.0, 0.0], 1.0, -0.12693),
    ([1000.0, 999.9], 1.0, -0.64440),
  ],
)
def test_logprob_of_the_first_token(logits, temperature, expected):
  tokens, logprobs = sample_rows(logits, temperature)
  assert logprobs[tokens == 0][0] == pytest.approx(expected, abs=1e-5)
  assert np.all(logprobs <= 0)
  exact = np.array(logits, np.float64) / temperature
  exact -= exact.max()
  exact -= np.log(np.exp(exact).sum())
  assert np.abs(logprobs - exact[tokens]).max() < 1e-4  # 999.9 is off by 3e-5 in fp32


def test_filters_renormalise():  # L4
  logits = np.log([0.5, 0.3, 0.15, 0.05])
  tokens, logprobs = sample_rows(logits, rule=SamplingRule(top_p=0.8))
  assert set(tokens) == {0, 1}
  assert logprobs[tokens == 0][0] == pytest.approx(-0.4700, abs=1e-4)
  assert logprobs[tokens == 1][0] == pytest.approx(np.log(0.3 / 0.8), abs=1e-4)
  tokens, logprobs = sample_rows(logits)
  assert logprobs[tokens == 0][0] == pytest.approx(-0.6931, abs=1e-4)
  tokens, logprobs = sample_rows(logits, rule=SamplingRule(top_k=3))
  assert set(tokens) == {0, 1, 2}
  assert logprobs[tokens == 2][0] == pytest.approx(np.log(0.15 / 0.95), abs=1e-4)
  tokens, logprobs = sample_rows(logits, rule=SamplingRule(top_p=0.5, top_k=3))  # of the three, 0.526 is enough
  assert set(tokens) == {0} and np.all(logprobs == 0)
  tokens, _ = sample_rows([0.0] * 6, rule=SamplingRule(top_k=2))
  assert set(tokens) == {0, 1}  # of equal tokens the lower ids
  tokens, _ = sample_rows(logits, rule=SamplingRule(top_p=1e-9))
  assert set(tokens) == {0}


def test_temperature_zero_takes_the_first_maximum_and_reports_temperature_one():
  logits = jnp.asarray([[0.0, 3.0, 3.0, 1.0], [1.0, 0.0, 0.0, 0.0]], jnp.float32)
  for uniform in (0.0, 0.999):
    tokens, logprobs = sample(logits, jnp.full((2, 2), uniform, jnp.float32), jnp.zeros((2,), jnp.float32), FREE)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[jnp.arange(2), tokens], atol=1e-6)


def test_each_row_has_its_own_temperature():
  logits = jnp.tile(jnp.asarray([[2.0, 0.0]], jnp.float32), (3, 1))
  temperature = jnp.asarray([0.0, 0.5, 1.0], jnp.float32)
  tokens, logprobs = sample(logits, jnp.zeros((3, 2), jnp.float32), temperature, FREE)
  assert tokens.tolist() == [0, 0, 0]
  np.testing.assert_allclose(logprobs, [-0.12693, -0.01815, -0.12693], atol=1e-5)


@pytest.mark.parametrize("vocab", [2, 5, 272])
def test_frequencies_match_probabilities(vocab):
  rows = 20_000
  weights = jax.random.exponential(jax.random.key(vocab), (vocab,), jnp.float32)
  uniforms = jax.random.uniform(jax.random.key(1), (rows, 2), jnp.float32)
  tokens = np.asarray(jax.jit(draw)(jnp.tile(weights, (rows, 1)), uniforms))
  probs = np.asarray(weights / weights.sum())
  counts = np.bincount(tokens, minlength=vocab)
  chi_square = np.sum((counts - rows * probs) ** 2 / (rows * probs))
  assert chi_square < vocab - 1 + 5 * np.sqrt(2 * (vocab - 1))  # five standard deviations


def test_a_uniform_at_the_border_of_two_tokens_draws_the_second():
  """[0, 1/2) and [1/2, 1): each token's interval has its lower end, and not its upper one."""
  uniforms = jnp.array([[0.0, 0.0], [0.0, 0.5], [0.5, 0.0], [0.5, 0.5]], jnp.float32)
  assert draw(jnp.ones((4, 4), jnp.float32), uniforms).tolist() == [0, 1, 2, 3]


@given(st.lists(st.sampled_from([0.0, 1e-42, 1e-30, 1e-8, 0.5, 1.0]), min_size=37, max_size=37), st.integers(0, 2**31))
def test_weight_zero_is_never_drawn(weights, seed):
  if not any(weights):
    return
  top = np.float32(1 - 2**-23)
  uniforms = np.random.default_rng(seed).random((50, 2), np.float32).clip(0, top)
  uniforms[:4] = [[0, 0], [top, top], [0, top], [top, 0]]
  tokens = jax.jit(draw)(jnp.tile(jnp.asarray(weights, jnp.float32), (50, 1)), jnp.asarray(uniforms))
  assert np.all(np.array(weights)[np.asarray(tokens)] > 0)


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-6])
def test_weight_zero_is_never_drawn_however_the_sum_is_rounded(monkeypatch, noise):
  """A cumulative sum that neither rises only where a weight stands nor ends at the total, as parallel ones may."""
  rng = np.random.default_rng(0)
  weights = rng.random((200, 40)).astype(np.float32) * (rng.random((200, 40)) < 0.3)
  weights[:, 7] += 1e-3  # one at least
  exact = np.cumsum(weights, axis=-1, dtype=np.float64)
  rounded = exact * (1 + noise * rng.uniform(-1, 1, exact.shape))
  rounded[:, -1] = exact[:, -1] * (1 - noise)
  monkeypatch.setattr(sampling.jnp, "cumsum", lambda x, axis: jnp.asarray(rounded, jnp.float32))
  # The extremes, and everywhere the edge between two tokens, with any number of impossible ones in between.
  edges = (exact / exact[:, -1:]).clip(0, 1 - 2**-24).astype(np.float32)
  for uniform in (np.zeros(200, np.float32), edges[:, -1], *edges.T):
    index = np.asarray(sampling._first_above(jnp.asarray(weights), jnp.asarray(uniform)))
    assert np.all(weights[np.arange(200), index] > 0)


@pytest.mark.parametrize("rule", [FREE, SamplingRule(top_k=9), SamplingRule(top_p=0.7)], ids=str)
def test_frequencies_and_logprobs_match_the_softmax(rule):
  """20,000 draws at temperature 0.7, two tokens impossible and many improbable, against the kept softmax in double."""
  rows, vocab, temperature = 20_000, 50, 0.7
  logits = np.random.default_rng(1).normal(0, 2, vocab).astype(np.float32)
  logits[[3, 11]], logits[20] = -np.inf, -90.0  # no weight at all, and one that underflows
  probs = np.exp(logits.astype(np.float64) / temperature)
  probs /= probs.sum()
  order = np.argsort(-probs, kind="stable")
  kept = order[: rule.top_k or vocab]
  kept = kept[: 1 + np.searchsorted(np.cumsum(probs[kept] / probs[kept].sum()), rule.top_p - 1e-6)]
  probs = np.where(np.isin(np.arange(vocab), kept), probs, 0)
  probs /= probs.sum()
  tokens, logprobs = sample(
    jnp.tile(jnp.asarray(logits), (rows, 1)),
    jax.random.uniform(jax.random.key(1), (rows, 2), jnp.float32),
    jnp.full((rows,), temperature, jnp.float32),
    rule,
  )
  counts = np.bincount(tokens, minlength=vocab)
  assert not counts[probs < 1e-30].any()
  np.testing.assert_allclose(logprobs, np.log(probs[np.asarray(tokens)]), atol=1e-5)
  possible = probs * rows > 5
  chi_square = np.sum((counts - rows * probs)[possible] ** 2 / (rows * probs[possible]))
  assert chi_square < possible.sum() + 5 * np.sqrt(2 * possible.sum())


def test_broken_logits_give_a_token_and_a_logprob_that_is_refused():
  """NaN logits: some id of the vocabulary, and no finite log-prob that could pass for evidence."""
  logits = jnp.full((3, 5), jnp.nan, jnp.float32).at[1, 2].set(0.0).at[2].set(-jnp.inf)
  tokens, logprobs = sample(logits, jnp.full((3, 2), 0.5, jnp.float32), jnp.ones((3,), jnp.float32), FREE)
  assert np.all((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 5)) and np.isnan(logprobs).all()


def test_random_numbers_depend_on_rollout_and_index_only():  # A15
  key = jax.random.key(3)
  array = lambda *x: jnp.asarray(x, jnp.int32)
  all_at_once = slot_uniforms(key, array(5, 9), array(10, 20), 6)
  assert all_at_once.shape == (6, 2, 2)
  other_slot = slot_uniforms(key, array(9, 1, 5), array(20, 0, 10), 6)
  np.testing.assert_array_equal(all_at_once[:, 0], other_slot[:, 2])
  np.testing.assert_array_equal(all_at_once[:, 1], other_slot[:, 0])
  later_dispatch = slot_uniforms(key, array(5), array(13), 3)
  np.testing.assert_array_equal(all_at_once[3:, 0], later_dispatch[:, 0])
  assert len(np.unique(np.asarray(all_at_once))) == 24
  assert not np.any(np.asarray(slot_uniforms(jax.random.key(4), array(5, 9), array(10, 20), 6) == all_at_once))
