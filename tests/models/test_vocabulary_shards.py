"""Embeddings and log-probs over eight devices: the matrices are gathered once, with equal values and gradients."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import MeshConfig, ModelConfig
from sao_jax.models.logprobs import token_logprobs
from sao_jax.models.vocabulary_shards import can_gather_vocabulary, sharded_embedding
from sao_jax.parallel.layout import DEFAULT_RULES, ONE_DEVICE, AxisRules, Layout
from sao_jax.parallel.mesh import make_mesh

CONFIG = ModelConfig(vocab_size=24, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=8)
ROWS, LENGTH = 8, 12
PLACES = {
  "data x fsdp": (MeshConfig(data=2, fsdp=4), DEFAULT_RULES),
  "context x tensor": (MeshConfig(data=1, fsdp=2, context=2, tensor=2), DEFAULT_RULES),
  "expert x tensor": (MeshConfig(fsdp=1, expert=4, tensor=2), DEFAULT_RULES),
  "copies of tokens": (MeshConfig(fsdp=2, context=4), AxisRules(sequence=None)),
}


@functools.cache
def operands():
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  ids = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH)), jnp.int32)
  segments = jnp.asarray(np.repeat([[1, 2, 0]], ROWS, 0).repeat([5, 4, 3], 1), jnp.int32)
  return normal(CONFIG.vocab_size, CONFIG.d_model), normal(CONFIG.d_model, CONFIG.vocab_size), ids, segments


def program(layout, tied, of=(0, 1)):
  """Jitted: a loss over log-probs and entropies of embedded tokens, and the gradients `of` these matrices."""
  config = dataclasses.replace(CONFIG, tie_embeddings=tied)

  def loss(embed, head, ids, segments):
    gathers = can_gather_vocabulary(layout)
    hidden = sharded_embedding(layout, "float32", embed, ids) if gathers else embed[ids]
    outputs = token_logprobs(
      {"embed": embed, "head": head}, config, hidden, ids, segments, temperature=0.7, chunk=5, layout=layout
    )
    weights = jnp.cos(jnp.arange(ids.size, dtype=jnp.float32)).reshape(ids.shape)
    return jnp.sum(outputs[0] * weights) + jnp.sum(outputs[1] * weights[::-1]), outputs

  shardings = None
  if layout.is_sharded:
    matrices = layout.sharding("vocab", "embed"), layout.sharding("embed", "vocab")
    shardings = (*matrices, *[layout.sharding("batch", "sequence")] * 2)
  return jax.jit(jax.value_and_grad(loss, argnums=of, has_aux=True), in_shardings=shardings)


@functools.cache
def on_one_device(tied):
  return program(ONE_DEVICE, tied)(*operands())


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("place", PLACES)
def test_values_and_gradients_equal_those_of_one_device(place, tied):
  mesh, rules = PLACES[place]
  layout = Layout(make_mesh(mesh), rules)
  assert can_gather_vocabulary(layout)
  got = program(layout, tied)(*operands())
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, on_one_device(tied))


def test_tokens_split_as_the_vocabulary_are_left_to_the_partitioner():
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
  assert not can_gather_vocabulary(Layout(mesh, AxisRules(batch=("data", "fsdp", "expert", "tensor"))))
  assert not can_gather_vocabulary(ONE_DEVICE)


def test_no_matrix_is_gathered_in_a_loop_and_no_gradient_is_summed_whole():
  """Two gathers of the head and one of the table, outside of the loop over blocks; gradients as reduce-scatters."""
  layout = Layout(make_mesh(MeshConfig(fsdp=8)))
  jaxpr = str(jax.make_jaxpr(program(layout, tied=False))(*operands()))
  assert len(re.findall(r"= all_gather\[", jaxpr)) == 3
  assert len(re.findall(r"= reduce_scatter\[", jaxpr)) == 2

  # All that is added up in full are scalars, and no loop gathers.
  text = program(layout, tied=False).lower(*operands()).compile().as_text()
  added = [line.split(" = ")[1].split(" all-reduce(")[0] for line in text.splitlines() if " all-reduce(" in line]
  assert not any(re.search(r"\[\d", shapes) for shapes in added), added
  loops = re.findall(r"^%\S*(?:body|region)\S* [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
  assert loops and not any("all-gather" in body for body in loops)


def test_a_frozen_head_costs_no_gradient():
  layout = Layout(make_mesh(MeshConfig(fsdp=8)))
  text = program(layout, tied=False, of=(0,)).lower(*operands()).compile().as_text()
  assert text.count(" reduce-scatter(") == 1
