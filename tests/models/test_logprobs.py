"""Token log-probabilities: alignment, temperature, precision, chunks that never build [B, T, V]."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.models.logprobs import has_prefix, token_logprobs
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.parallel.params import init_params
from sao_jax.types import TrajectoryBatch

CONFIG = ModelConfig(vocab_size=7, num_layers=1, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=8)


def from_logits(logits, ids, segments=None, **options):
  """Log-probs of a model whose hidden states are these logits: the head is the identity."""
  vocab = logits.shape[-1]
  config = dataclasses.replace(CONFIG, vocab_size=vocab, d_model=vocab)
  params = {"head": jnp.eye(vocab, dtype=jnp.float32)}
  ids = jnp.asarray(ids, jnp.int32)
  segments = None if segments is None else jnp.asarray(segments, jnp.int32)
  checked = jaxtyped(typechecker=beartype)(token_logprobs)
  return checked(params, config, jnp.asarray(logits, jnp.float32), ids, segments, **options)


def test_alignment():
  """L1: entry t comes from the logits at t - 1; the first token of a row or segment has none."""
  logits = np.array([[[0, 0, 0], [0, 0, np.log(2)], [5, 0, 0]]], np.float32)
  logprobs, entropy = from_logits(logits, [[0, 1, 2]])
  np.testing.assert_allclose(logprobs, [[0, -1.0986, -0.6931]], atol=1e-4)
  np.testing.assert_allclose(entropy, [[0, 1.0986, 1.0397]], atol=1e-4)
  packed, _ = from_logits(np.tile(logits, (1, 2, 1)), [[0, 1, 2, 0, 1, 2]], [[1, 1, 1, 2, 2, 2]])
  np.testing.assert_allclose(packed, [[0, -1.0986, -0.6931] * 2], atol=1e-4)
  padded, _ = from_logits(np.tile(logits, (1, 2, 1)), [[0, 1, 2, 0, 0, 0]], [[1, 1, 1, 0, 0, 0]])
  np.testing.assert_allclose(padded, [[0, -1.0986, -0.6931, 0, 0, 0]], atol=1e-4)


@pytest.mark.parametrize(
  ("logits", "temperature", "token", "expected"),
  [
    ([2, 0], 0.5, 0, -0.01815),  # L2
    ([2, 1, 0], 0.5, 0, -0.14293),  # L3: the logits are divided, not the log-probs
    ([20, 19.9], 1.0, 0, -0.64440),  # L6: bf16 would give -0.63260
    ([2, 0], 1.0, 1, -2.12693),
  ],
)
def test_temperature_and_precision(logits, temperature, token, expected):
  logprobs, _ = from_logits(np.array([[logits, logits]]), [[0, token]], temperature=temperature)
  np.testing.assert_allclose(logprobs[0, 1], expected, atol=1e-5)
  assert logprobs.dtype == jnp.float32 and float(logprobs.max()) <= 0


def test_extreme_logits_stay_finite():
  logprobs, entropy = from_logits(np.array([[[1e4, -1e4], [-1e4, 1e4]]]), [[0, 0]])
  np.testing.assert_allclose(logprobs, [[0, 0]], atol=0)
  np.testing.assert_allclose(entropy, [[0, 0]], atol=0)
  logprobs, _ = from_logits(np.array([[[1e4, -1e4], [0, 0]]]), [[0, 1]])
  np.testing.assert_allclose(logprobs, [[0, -2e4]])


def test_has_prefix():
  segments = jnp.asarray([[1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3]], jnp.int32)
  assert has_prefix(segments).astype(int).tolist() == [[0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1]]


@functools.partial(jax.jit, static_argnames="chunk")
def value_and_gradients(params, hidden, ids, chunk):
  def total(params, hidden):
    logprobs, entropy = token_logprobs(params, CONFIG, hidden, ids, temperature=0.7, chunk=chunk)
    return jnp.sum(jnp.sin(logprobs)) + 0.1 * jnp.sum(entropy)

  return jax.value_and_grad(total, argnums=(0, 1))(params, hidden)


def test_chunks_change_nothing():
  rng = np.random.default_rng(0)
  params = {"head": jnp.asarray(rng.normal(size=(8, 7)), jnp.float32)}
  hidden = jnp.asarray(rng.normal(size=(3, 10, 8)), jnp.float32)
  ids = jnp.asarray(rng.integers(0, 7, (3, 10)), jnp.int32)
  logits = hidden @ params["head"] / 0.7
  logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids[:, 1:, None], -1)[..., 0]
  entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), -1)[:, :-1]
  expected = value_and_gradients(params, hidden, ids, 1024)
  np.testing.assert_allclose(expected[0], jnp.sum(jnp.sin(logprobs)) + 0.1 * jnp.sum(entropy), rtol=1e-5)
  for chunk in (1, 7, 12):
    got = value_and_gradients(params, hidden, ids, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_logits_of_the_whole_batch_are_never_built():
  """No array of the compiled gradient holds more than a chunk of logits."""
  config = dataclasses.replace(CONFIG, vocab_size=997)  # a prime: its multiples are logits
  rows, length, chunk = 4, 64, 32
  params = init_params(param_specs(config), jax.random.key(0))
  batch = packed_batch(np.zeros((rows, length), np.int32))
  apply = make_policy_apply(config, chunk=chunk)
  loss = jax.jit(jax.grad(lambda params: jnp.sum(apply(params, batch).logprobs)))
  allowed = 997 * max(chunk, config.d_model)
  sizes = [size for size in array_sizes(loss.trace(params).jaxpr.jaxpr) if size % 997 == 0]
  assert sizes and max(sizes) <= allowed
  temporaries = loss.lower(params).compile().memory_analysis().temp_size_in_bytes
  assert temporaries < 4 * 997 * rows * length


def array_sizes(jaxpr):
  """Number of elements of every intermediate array, loop bodies included."""
  for equation in jaxpr.eqns:
    yield from (int(np.prod(var.aval.shape)) for var in equation.outvars)
    for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
      inner = getattr(parameter, "jaxpr", parameter)
      if hasattr(inner, "eqns"):
        yield from array_sizes(inner)


def packed_batch(ids, segments=None, positions=None):
  """A batch for apply-functions; the fields that models do not read are zeros."""
  ids = jnp.asarray(ids, jnp.int32)
  segments = jnp.ones_like(ids) if segments is None else jnp.asarray(segments, jnp.int32)
  positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] if positions is None else positions
  numbers, flags = jnp.zeros(ids.shape, jnp.float32), jnp.zeros(ids.shape, jnp.bool_)
  return TrajectoryBatch(
    token_ids=ids,
    segment_ids=segments,
    trajectory_ids=segments,
    positions=jnp.broadcast_to(jnp.asarray(positions, jnp.int32), ids.shape),
    action_mask=flags,
    loss_mask=flags,
    behavior_logprobs=numbers,
    policy_version=jnp.zeros_like(ids),
    rewards=numbers,
    truncated=flags,
  )


MOE = dataclasses.replace(CONFIG, num_experts=4, num_experts_per_token=2, d_ff_expert=8, num_layers=2, d_ff_shared=4)


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "moe"])
def test_a_sequence_has_the_same_logprobs_wherever_it_lies(config):
  """L8 and trap 10: alone, behind padding, before padding, behind another sequence, with other batch mates."""
  params = jax.tree.map(lambda x: x * 20, init_params(param_specs(config), jax.random.key(1)))
  apply = jax.jit(make_policy_apply(config))
  rng = np.random.default_rng(0)
  sequence, other = rng.integers(0, 7, 5), rng.integers(0, 7, 3)
  own, pad = np.arange(5), np.zeros(3, int)
  rows = {  # name: ids, segments, positions, where the sequence starts; all padded to length 8 and two rows
    "right-padded": ([*sequence, *pad], [1] * 5 + [0] * 3, [*own, *pad], 0),
    "left-padded": ([*pad, *sequence], [0] * 3 + [1] * 5, [*pad, *own], 3),
    "packed": ([*other, *sequence], [1] * 3 + [2] * 5, [*range(3), *own], 3),
  }

  def run(ids, segments, positions, mate):
    tokens = np.stack([ids, mate])
    return apply(params, packed_batch(tokens, [segments, [1] * 8], [positions, list(range(8))]))

  results = {}
  for name, (ids, segments, positions, start) in rows.items():
    for seed in (0, 1):
      outputs = run(ids, segments, positions, np.random.default_rng(seed).integers(0, 7, 8))
      results[name, seed] = np.stack([outputs.logprobs[0], outputs.entropy[0]])[:, start : start + 5]
  alone = jax.jit(make_policy_apply(config))(params, packed_batch(sequence[None]))
  for key, got in results.items():
    np.testing.assert_allclose(got, np.stack([alone.logprobs[0], alone.entropy[0]]), atol=1e-5, err_msg=str(key))
  assert np.abs(alone.logprobs[0, 1:]).min() > 1e-3


@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_every_device_computes_the_logits_of_its_own_tokens(chunk):
  """Rows over one axis and their tokens over another: equal results, and an eighth of the work for each of eight."""
  config = dataclasses.replace(CONFIG, vocab_size=64, d_model=32)
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.normal(size=(2, 20, 32)), jnp.float32)
  params = {"head": jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)}
  ids = jnp.asarray(rng.integers(0, 64, (2, 20)), jnp.int32)
  segments = jnp.asarray([[1] * 7 + [2] * 10 + [0] * 3] * 2, jnp.int32)

  def compiled(layout):
    place = lambda x, *axes: jax.device_put(x, layout.sharding(*axes)) if layout.is_sharded else x
    arrays = place(hidden, "batch", "sequence", None), *(place(x, "batch", "sequence") for x in (ids, segments))
    run = lambda hidden, ids, segments: token_logprobs(
      params, config, hidden, ids, segments, chunk=chunk, layout=layout
    )
    program = jax.jit(run).lower(*arrays).compile()
    return program(*arrays), program.cost_analysis()["flops"]

  expected, of_one = compiled(ONE_DEVICE)
  got, of_eight = compiled(Layout(make_mesh(MeshConfig(fsdp=2, context=4))))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
  if chunk == 1024:  # one block: the compiler counts a loop's work once
    assert of_eight < 1.3 * of_one / 8
