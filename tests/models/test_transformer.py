"""The transformer against an independent one written in numpy loops: one token, one head, one expert at a time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped
from toys.masked_attention import packed_causal_mask
from toys.transformer_toy import IDS, MOE, POSITIONS, SEGMENTS, SMALL, logits_of, random_params

from sao_jax.models import linear, rope
from sao_jax.models.attention import packed
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.transformer import head_logits, param_specs, trunk
from sao_jax.parallel.params import abstract_params, path_names

CONFIGS = {
  "dense": SMALL,
  "tied, no q/k norm": dataclasses.replace(SMALL, tie_embeddings=True, qk_norm=False, num_layers=1),
  "moe": MOE,
  "moe, shared expert, first layer dense, raw weights": dataclasses.replace(
    MOE, d_ff_shared=10, num_dense_layers=1, num_layers=3, renormalize_router=False
  ),
}


def numpy_logits(params, config, ids, positions, segments):
  """The definition, in float64, without any batched operation. Returns [T, V] for one row."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  norm = lambda x, scale: x / np.sqrt(np.mean(x * x) + config.rms_norm_eps) * scale
  silu = lambda x: x / (1 + np.exp(-x))
  half = config.head_dim // 2

  def rotate(x, position):
    out = np.zeros_like(x)
    for i in range(half):
      angle = position * config.rope_theta ** (-2 * i / config.head_dim)
      out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
      out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out

  def gated(weights, x):
    return (silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]

  def moe(weights, x):
    scores = np.exp(x @ weights["router"])
    scores = scores / scores.sum()
    chosen = sorted(range(config.num_experts), key=lambda e: (-scores[e], e))[: config.num_experts_per_token]
    total = sum(scores[e] for e in chosen) if config.renormalize_router else 1.0
    out = sum(scores[e] / total * gated({n: weights[n][e] for n in ("gate", "up", "down")}, x) for e in chosen)
    return out + gated(weights["shared"], x) if "shared" in weights else out

  stacks = [params[name] for name in ("dense_layers", "moe_layers") if name in params]
  layers = [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for stack in stacks for i in range(len(stack["mlp_norm"]))]
  assert len(layers) == config.num_layers
  states = [params["embed"][token] for token in ids]
  group = config.num_heads // config.num_kv_heads
  for layer in layers:
    weights = layer["attention"]
    queries, keys, values = [], [], []
    for x, position in zip(states, positions):
      x = norm(x, layer["attention_norm"])
      q = [x @ weights["q"][:, head] for head in range(config.num_heads)]
      k = [x @ weights["k"][:, head] for head in range(config.num_kv_heads)]
      if config.qk_norm:
        q, k = [norm(head, weights["q_norm"]) for head in q], [norm(head, weights["k_norm"]) for head in k]
      queries.append([rotate(head, position) for head in q])
      keys.append([rotate(head, position) for head in k])
      values.append([x @ weights["v"][:, head] for head in range(config.num_kv_heads)])
    for t in range(len(ids)):
      out = np.zeros(config.d_model)
      for head in range(config.num_heads):
        visible = [s for s in range(t + 1) if segments[s] == segments[t]]
        scores = np.array([queries[t][head] @ keys[s][head // group] for s in visible]) / np.sqrt(config.head_dim)
        probs = np.exp(scores) / np.exp(scores).sum()
        out += sum(p * values[s][head // group] for p, s in zip(probs, visible)) @ weights["o"][head]
      states[t] = states[t] + out
    for t, x in enumerate(states):
      x = norm(x, layer["mlp_norm"])
      states[t] = states[t] + (moe(layer["moe"], x) if "moe" in layer else gated(layer["mlp"], x))
  head = params["embed"].T if config.tie_embeddings else params["head"]
  return np.stack([norm(x, params["final_norm"]) @ head for x in states])


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_numpy_transformer(name):
  config = CONFIGS[name]
  params = random_params(config)
  logits = jax.jit(logits_of, static_argnums=1)(params, config, IDS, POSITIONS, SEGMENTS)
  assert logits.dtype == jnp.float32 and logits.shape == (2, 6, config.vocab_size)
  for row in range(2):
    expected = numpy_logits(params, config, IDS[row], POSITIONS[row], SEGMENTS[row])
    real = SEGMENTS[row] > 0  # what padding reads of padding is nobody's business
    np.testing.assert_allclose(logits[row][real], expected[real], rtol=2e-4, atol=2e-4)


def test_declared_tree():
  tree = param_specs(CONFIGS["moe, shared expert, first layer dense, raw weights"])
  assert tree["dense_layers"]["mlp"]["gate"].shape == (1, 8, 12)
  assert tree["moe_layers"]["attention"]["q"].shape == (2, 8, 4, 4)
  assert tree["moe_layers"]["attention"]["o"].shape == (2, 4, 4, 8)
  assert tree["moe_layers"]["moe"]["down"].shape == (2, 4, 6, 8)
  assert tree["moe_layers"]["moe"]["shared"]["up"].shape == (2, 8, 10)
  assert "head" not in param_specs(CONFIGS["tied, no q/k norm"]) and "head" in tree
  assert not [name for name in path_names(param_specs(CONFIGS["tied, no q/k norm"])) if "q_norm" in name]
  assert "dense_layers" not in param_specs(MOE) and "moe_layers" not in param_specs(SMALL)


def test_tied_head_reads_the_embedding():
  """L16: a row of ones in the embedding is a row of ones in the head."""
  config = CONFIGS["tied, no q/k norm"]
  params = random_params(config)
  params["embed"] = params["embed"].at[0].set(1.0)
  hidden = jnp.arange(8, dtype=jnp.float32)
  np.testing.assert_allclose(head_logits(params, config, hidden)[0], 28.0, rtol=1e-6)


def test_precision_of_the_head():
  """L6: the head accumulates in fp32 and answers in fp32, whatever the activation dtype."""
  config = dataclasses.replace(SMALL, vocab_size=2, d_model=2048)
  params = {"head": jnp.full((2048, 2), 0.01, jnp.float32).at[:, 1].set(0.00995)}
  logits = head_logits(params, config, jnp.ones((2048,), jnp.bfloat16))
  assert logits.dtype == jnp.float32
  exact = np.asarray(params["head"].astype(jnp.bfloat16), np.float64).sum(0)
  np.testing.assert_allclose(logits, exact, rtol=1e-6)


@pytest.mark.parametrize("remat", ["full", "dots", "attention", "offload"])
def test_remat_changes_nothing(remat):
  def loss(params, config):
    return jnp.sum(jnp.square(logits_of(params, config, IDS, POSITIONS, SEGMENTS)))

  params = random_params(MOE)
  grad = jax.jit(jax.grad(loss), static_argnums=1)
  expected, got = grad(params, MOE), grad(params, dataclasses.replace(MOE, remat=remat))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def test_carry_and_layer_index_reach_attend():
  """What a cache needs: every layer is called once, in order, with its index and the carry of the layer before."""
  config = CONFIGS["moe, shared expert, first layer dense, raw weights"]

  def attend(q, k, v, layer_index, carry):
    return q, carry.at[layer_index].set(layer_index + 10 * carry.max())

  run = jax.jit(lambda params: trunk(params, config, IDS, POSITIONS, attend=attend, carry=jnp.zeros(3, jnp.int32))[1])
  carry = run(random_params(config))
  assert carry.tolist() == [0, 1, 12]


def test_mask_of_packed_rows():
  mask = np.asarray(packed_causal_mask(jnp.asarray([[1, 1, 2, 0]], jnp.int32)))[0]
  assert mask.tolist() == [
    [True, False, False, False],
    [True, True, False, False],
    [False, False, True, False],
    [False, False, False, True],
  ]


def test_rope_angles_are_fp32():
  """L9: at position 32768, theta 1e6, head_dim 128 the angles of bf16 frequencies would be off by tens of radians."""
  cos, sin = rope.rope_table(jnp.asarray([[32768]], jnp.int32), 128, 1e6)
  angles = 32768 * 1e6 ** (-np.arange(0, 128, 2) / 128)
  np.testing.assert_allclose(cos[0, 0], np.cos(angles), atol=6e-3)
  np.testing.assert_allclose(sin[0, 0], np.sin(angles), atol=6e-3)
  assert cos.dtype == sin.dtype == jnp.float32


def test_norm_is_fp32_inside():
  x = jnp.asarray([300.0, -300.0, 1.0], jnp.bfloat16)
  out = linear.rms_norm(x, jnp.ones(3, jnp.float32), 1e-6)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32), [1.2247, -1.2247, 0.00408], rtol=5e-3)


def test_annotations_hold():
  checked = jaxtyped(typechecker=beartype)
  q, k = jnp.ones((1, 3, 4, 2), jnp.float32), jnp.ones((1, 3, 2, 2), jnp.float32)
  checked(packed.packed_attention())(q, k, k, jnp.ones((1, 3), jnp.int32))
  checked(linear.rms_norm)(q, jnp.ones(2, jnp.float32), 1e-6)
  checked(rope.apply_rope)(q, checked(rope.rope_table)(jnp.zeros((1, 3), jnp.int32), 2, 1e4))


def test_bf16_activations():
  config = dataclasses.replace(MOE, dtype="bfloat16", param_dtype="bfloat16")

  def run(params):
    hidden, _, _ = trunk(params, config, IDS, POSITIONS, attend=packed_attend(jnp.asarray(SEGMENTS)))
    return hidden, head_logits(params, config, hidden)

  hidden, logits = jax.eval_shape(run, abstract_params(param_specs(config)))
  assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
