"""Micro-batches and accumulation; helpers along packed rows; run-time checks of the shape annotations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError, jaxtyped

from sao_jax.algorithm import advantage, diagnostics, network, policy_loss, tokens, value_loss
from sao_jax.errors import ConfigError

SEGMENTS = np.array([1, 1, 1, 2, 2, 3, 0, 0], np.int32)


def test_row_r_goes_to_micro_batch_r_mod_m():
  rows = {"a": np.arange(8), "b": np.arange(16).reshape(8, 2)}
  parts = network.split_rows(rows, 4)
  np.testing.assert_array_equal(parts["a"], [[0, 4], [1, 5], [2, 6], [3, 7]])
  assert parts["b"].shape == (4, 2, 2)
  jax.tree.map(np.testing.assert_array_equal, network.join_rows(parts), rows)
  with pytest.raises(ConfigError, match="5 micro-batches do not divide a batch of 8 rows"):
    network.split_rows(rows, 5)


def test_split_keeps_rows_on_their_devices():
  sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))
  parts = jax.jit(lambda x: network.split_rows(x, 2))(jax.device_put(np.arange(16), sharding))
  assert parts.sharding.spec == PartitionSpec(None, "data")


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_accumulated_gradients(micro_batches, dtype):
  """Parts are summed in fp32 and returned in the parameters' dtype."""
  x = np.arange(8, dtype=np.float32)
  loss_fn = lambda leaves, rows: (jnp.sum(leaves["w"] * rows) / 8, rows + 1)
  loss, outputs, grads = network.accumulate_gradients(loss_fn, {"w": jnp.ones((), dtype)}, x, micro_batches)
  np.testing.assert_allclose(loss, 3.5)
  np.testing.assert_array_equal(outputs, x + 1)
  np.testing.assert_allclose(grads["w"], 3.5)
  assert grads["w"].dtype == dtype


def test_helpers_along_rows():
  bits = lambda *x: np.array(x, bool)
  mask = bits(0, 1, 0, 1, 1, 0, 0, 0)
  np.testing.assert_array_equal(tokens.starts(SEGMENTS), bits(1, 0, 0, 1, 0, 1, 1, 0))
  np.testing.assert_array_equal(tokens.ends(SEGMENTS), bits(0, 0, 1, 0, 1, 1, 0, 1))
  np.testing.assert_array_equal(tokens.totals(mask, SEGMENTS), [1, 1, 1, 2, 2, 0, 0, 0])
  np.testing.assert_array_equal(tokens.last_sampled(mask, SEGMENTS), bits(0, 1, 0, 0, 1, 0, 0, 0))
  x = np.arange(1.0, 9.0, dtype=np.float32)
  np.testing.assert_array_equal(tokens.at_end(x, SEGMENTS), [3, 3, 3, 5, 5, 6, 8, 8])
  np.testing.assert_array_equal(tokens.next_sampled(x, mask), [2, 4, 4, 5, 0, 0, 0, 0])
  # the value before the first token of a later action is read at the observation in front of it
  np.testing.assert_array_equal(tokens.before_token(x, SEGMENTS), [0, 1, 2, 0, 4, 0, 0, 7])
  np.testing.assert_array_equal(tokens.before_token(x[:, None], SEGMENTS)[:, 0], [0, 1, 2, 0, 4, 0, 0, 7])


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("reverse", [False, True])
def test_affine_scan_equals_its_recursion(length, reverse):
  u, d = np.random.default_rng(length).random((2, length)).astype(np.float32)
  expected, y = np.zeros(length), 0.0
  for t in reversed(range(length)) if reverse else range(length):
    expected[t] = y = d[t] + (1 - u[t]) * y
  np.testing.assert_allclose(tokens.affine_scan(u, d, reverse=reverse), expected, rtol=1e-6)


def test_shape_annotations_hold():
  """Public functions, with their annotations checked at run time."""
  checked = lambda fn: jaxtyped(typechecker=beartype)(fn)
  x, mask, ones = jnp.linspace(-1.0, 0.0, 8), jnp.arange(8) % 2 == 0, jnp.ones(8, jnp.int32)
  checked(policy_loss.dis_policy_loss)(x, x, x, mask, epsilon_low=0.3, epsilon_high=5.0)
  checked(value_loss.value_loss)(x, x, mask)
  checked(advantage.packed_returns)(x, x, mask, ones, one_minus_lam=x)
  checked(advantage.skip_observation_gae)(x, x, mask, lam=0.9)
  checked(advantage.masked_whiten)(x, mask)
  checked(diagnostics.explained_variance)(x, x, mask)
  with pytest.raises(TypeCheckError):
    checked(policy_loss.dis_policy_loss)(x, x[:4], x, mask, epsilon_low=0.3, epsilon_high=5.0)
  with pytest.raises(TypeCheckError):
    checked(advantage.packed_returns)(x, x, mask, ones, one_minus_lam=x[:, None])
