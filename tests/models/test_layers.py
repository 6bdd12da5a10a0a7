"""Stacks of layers as loops and as straight code, what remat keeps, and states of padding that are not finite."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from toys.masked_attention import grouped_attention, packed_causal_mask
from toys.transformer_toy import IDS, MOE, POSITIONS, SEGMENTS, SMALL, logits_of, random_params

from sao_jax.models import transformer
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.transformer import param_specs, trunk
from sao_jax.parallel.params import abstract_params

DEEP = dataclasses.replace(SMALL, num_layers=6)
DEEP_MOE = dataclasses.replace(MOE, num_layers=7, num_dense_layers=1)


def logits_and_gradients(params, config):
  """Not jitted across tests: whether layers are unrolled is read while tracing."""

  def value(params):
    logits = logits_of(params, config, IDS, POSITIONS, SEGMENTS)
    return jnp.mean(jnp.sin(logits)), logits

  return jax.jit(jax.value_and_grad(value, has_aux=True))


def loops_over_layers(params, config):
  """Lengths of the loops over layers that are really loops: the trips of each in the compiled program's source."""
  jaxpr = jax.make_jaxpr(lambda params: logits_of(params, config, IDS, POSITIONS, SEGMENTS))(params)
  tokens = [eqn.params for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
  stacks = [params[name]["mlp_norm"].shape[0] for name in ("dense_layers", "moe_layers") if name in params]
  return [p["length"] for p in tokens if p["length"] in stacks and p["unroll"] < p["length"]]


@pytest.mark.parametrize("config", [DEEP, DEEP_MOE], ids=["dense", "moe behind a dense layer"])
def test_loop_and_straight_code_agree(monkeypatch, config):
  params = random_params(config)
  assert loops_over_layers(params, config) == [6]
  rolled = logits_and_gradients(params, config)(params)
  monkeypatch.setattr(transformer, "UNROLLED_LAYERS", 99)
  assert loops_over_layers(params, config) == []
  straight = logits_and_gradients(params, config)(params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), rolled, straight)


TOKENS = 24  # another size than any width


def equations(jaxpr):
  """All equations of a jaxpr, those inside of others too."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jaxprs_in_params(eqn.params):
      yield from equations(inner)


def loss(params, config, tokens=TOKENS):
  """Of hidden states alone: a head would hide the layers' share of the work."""
  ones = jnp.ones((4, tokens), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), ones.shape)
  return jnp.sum(jnp.square(trunk(params, config, ones, positions, attend=packed_attend(ones))[0]))


@pytest.mark.parametrize("num_layers", [1, 3, 6])
def test_remat_keeps_less(num_layers):
  """Bytes that the forward pass hands to the backward pass: all activations, matmul results, layer inputs only."""
  config = dataclasses.replace(SMALL, num_layers=num_layers, d_ff=256)

  def residual_bytes(remat):
    fn = functools.partial(loss, config=dataclasses.replace(config, remat=remat))
    saved = jax.eval_shape(lambda params: jax.vjp(fn, params)[1], abstract_params(param_specs(config)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))

  none, dots, full = (residual_bytes(remat) for remat in ("none", "dots", "full"))
  assert none > 1.5 * dots and dots > 3 * full


def test_policies_that_keep_what_attention_gave_do_not_compute_it_again():
  """Attention has one product with a column per key forwards; backwards, scores have columns of queries and heads."""
  params = abstract_params(param_specs(SMALL))

  def products(remat):
    config = dataclasses.replace(SMALL, remat=remat)
    gradient = jax.make_jaxpr(jax.grad(functools.partial(loss, config=config)))(params)
    dots = [eqn for eqn in equations(gradient.jaxpr) if eqn.primitive.name == "dot_general"]
    return sum(eqn.outvars[0].aval.shape[-1] == TOKENS for eqn in dots)

  by_remat = {remat: products(remat) for remat in ("none", "dots", "attention", "offload", "full")}
  assert by_remat == {"none": 1, "dots": 1, "attention": 1, "offload": 1, "full": 2}


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_compiler_does_not_undo_remat(monkeypatch, num_layers):
  """The compiled gradient really computes the layer again; for a TPU, see test_models_tpu.py."""
  monkeypatch.setattr(transformer, "UNROLLED_LAYERS", 0)

  def flops(remat):
    config = dataclasses.replace(SMALL, num_layers=num_layers, d_ff=256, remat=remat)
    gradient = jax.jit(jax.grad(functools.partial(loss, config=config)))
    return gradient.lower(abstract_params(param_specs(config))).compile().cost_analysis()["flops"]

  assert flops("full") > 1.2 * flops("none")


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_that_is_not_finite_reaches_nobody(poison):
  keys = jax.random.split(jax.random.key(0), 3)
  q, k, v = (jax.random.normal(key, (2, 6, n, 4), jnp.float32) for key, n in zip(keys, (4, 2, 2)))
  segments = jnp.asarray(SEGMENTS)
  real = np.asarray(SEGMENTS) > 0
  expected = grouped_attention(q, k, v, packed_causal_mask(segments))
  broken = [jnp.where(real[..., None, None], x, poison) for x in (q, k, v)]
  got, _ = packed_attend(segments)(*broken, jnp.int32(0), None)
  np.testing.assert_allclose(got[real], expected[real], rtol=1e-5, atol=1e-6)
