"""YaRN by its definition: which frequencies are stretched, by how much, and that the model uses them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import transformer_toy

from sao_jax.config import YarnConfig
from sao_jax.models import transformer
from sao_jax.models.rope import rope_frequencies, rope_table, yarn_attention_factor

YARN = YarnConfig(factor=4.0, original_positions=4096, beta_fast=32.0, beta_slow=1.0)


def turns(index: float, dim: int, theta: float, yarn: YarnConfig) -> float:
  """How often the pair of dimensions turns within the positions of pretraining."""
  return yarn.original_positions * theta ** (-2 * index / dim) / (2 * math.pi)


def crossing(wanted: float, dim: int, theta: float, yarn: YarnConfig) -> float:
  """The real index at which a pair would turn so often; turns fall with the index, so halving finds it."""
  low, high = -float(dim), 2.0 * dim
  for _ in range(100):
    middle = (low + high) / 2
    low, high = (middle, high) if turns(middle, dim, theta, yarn) > wanted else (low, middle)
  return low


@pytest.mark.parametrize("dim, theta", [(128, 1e4), (64, 1e6), (16, 1e4)])
@pytest.mark.parametrize(
  "change",
  [{}, {"factor": 1.5}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}, {"original_positions": 64}],
)
def test_fast_frequencies_stay_slow_ones_are_divided_and_between_them_both_are_mixed(dim, theta, change):
  yarn = dataclasses.replace(YARN, **change)
  start, end = crossing(yarn.beta_fast, dim, theta, yarn), crossing(yarn.beta_slow, dim, theta, yarn)
  if yarn.truncate:
    start, end = math.floor(start), math.ceil(end)
  start, end = max(start, 0), min(end, dim - 1)
  expected = []
  for index in range(dim // 2):
    plain = theta ** (-2 * index / dim)
    share = min(max((index - start) / (end - start), 0.0), 1.0)
    expected.append(share * plain / yarn.factor + (1 - share) * plain)
  found = np.asarray(rope_frequencies(dim, theta, yarn))
  np.testing.assert_allclose(found, expected, rtol=2e-5)

  # The ends of the mix, by what they mean.
  plain = np.asarray(rope_frequencies(dim, theta))
  for index in range(dim // 2):
    often = turns(index, dim, theta, yarn)
    if often > yarn.beta_fast * theta ** (2 / dim):
      np.testing.assert_allclose(found[index], plain[index], rtol=1e-6)
    if often < yarn.beta_slow / theta ** (2 / dim):
      np.testing.assert_allclose(found[index], plain[index] / yarn.factor, rtol=1e-6)


def test_the_attention_factor_scales_cosine_and_sine():
  positions = jnp.arange(8, dtype=jnp.int32)[None]
  scaled = ((dataclasses.replace(YARN, attention_factor=0.75), 0.75), (YarnConfig(attention_factor=0.75), 0.75))
  for yarn, factor in ((YARN, 1.1386294361119891), *scaled):
    cos, sin = (np.asarray(part, np.float64) for part in rope_table(positions, 16, 1e4, yarn))
    angles = np.arange(8)[:, None] * np.asarray(rope_frequencies(16, 1e4, yarn), np.float64)
    np.testing.assert_allclose(cos[0], factor * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin[0], factor * np.sin(angles), atol=1e-5)
  assert yarn_attention_factor(YarnConfig(factor=1.0)) == 1.0


@pytest.mark.parametrize("change", [{}, {"factor": 32.0}, {"beta_fast": 1.0}, {"original_positions": 64}])
def test_the_ramp_of_llama_3_1_goes_by_turns(change):
  """Its frequencies, one by one: kept where a wave is short, divided where it is long, between them by its turns."""
  llama = YarnConfig(factor=8.0, original_positions=8192, beta_fast=4.0, beta_slow=1.0, ramp="turns")
  llama = dataclasses.replace(llama, **change)
  found = np.asarray(rope_frequencies(128, 5e5, llama), np.float64)
  mixed = 0
  for index, got in enumerate(found):
    plain = 5e5 ** (-index / 64)
    wave = 2 * math.pi / plain
    if wave < llama.original_positions / llama.beta_fast:
      expected = plain
    elif wave > llama.original_positions / llama.beta_slow:
      expected = plain / llama.factor
    else:
      kept = (llama.original_positions / wave - llama.beta_slow) / (llama.beta_fast - llama.beta_slow)
      expected, mixed = (1 - kept) * plain / llama.factor + kept * plain, mixed + 1
    assert got == pytest.approx(expected, rel=2e-5), index
  assert bool(mixed) == (llama.beta_fast > llama.beta_slow)


def test_the_model_turns_by_its_own_yarn(monkeypatch):
  config = dataclasses.replace(transformer_toy.SMALL, yarn=dataclasses.replace(YARN, original_positions=64))
  used = []

  def table(positions, rotary_dim, theta, yarn):
    used.append((rotary_dim, theta, yarn))
    return rope_table(positions, rotary_dim, theta, yarn)

  monkeypatch.setattr(transformer, "rope_table", table)
  of_config = lambda params: transformer_toy.logits_of(
    params, config, transformer_toy.IDS, transformer_toy.POSITIONS, transformer_toy.SEGMENTS
  )
  jax.eval_shape(of_config, transformer_toy.random_params(config))
  assert used == [(config.head_dim, config.rope_theta, config.yarn)]
