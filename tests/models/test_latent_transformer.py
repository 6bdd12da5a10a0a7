"""The transformer with latent, sparse attention: which layer reads whose selection, remat, meshes, what is declared."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from toys import latent_toy as toy
from toys.sharding_toy import loss_and_gradients, make_batch

from sao_jax.config import MeshConfig
from sao_jax.models.attention.latent import latent_layer, packed_latent_attend
from sao_jax.models.linear import feed_forward, rms_norm
from sao_jax.models.rope import rope_table
from sao_jax.models.transformer import param_specs, trunk
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import check_mesh_divides_model, make_mesh
from sao_jax.parallel.params import init_params

# The second layer, the first of the expert layers, reads what the dense one before them chose.
SHARED = dataclasses.replace(
  toy.CONFIG, num_layers=3, indexer_types=("full", "shared", "full"), num_experts=4, d_ff_expert=8, num_dense_layers=1
)
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, toy.LENGTH)), jnp.int32)
SEGMENTS = jnp.asarray([[1] * toy.LENGTH, [1] * 4 + [2] * 9], jnp.int32)
POSITIONS = jnp.asarray([range(toy.LENGTH), [*range(4), *range(9)]], jnp.int32)


@functools.partial(jax.jit, static_argnames="config")
def hidden_of(params, config):
  return trunk(params, config, IDS, POSITIONS, attend=packed_latent_attend(config, SEGMENTS))[0]


def test_indexers_are_a_stack_of_their_own():
  specs = param_specs(SHARED)
  assert {name: spec.shape for name, spec in specs["indexer_layers"].items()} == {
    "q": (2, 16, 8, 9),
    "k": (2, 32, 9),
    "k_norm": (2, 9),
    "k_norm_bias": (2, 9),
    "weights": (2, 32, 8),
  }
  assert specs["moe_layers"]["attention"]["kv_b"].shape == (2, 12, 4, 16)
  assert "indexer_layers" not in param_specs(dataclasses.replace(SHARED, index_topk=0))


@functools.partial(jax.jit, static_argnames="config")
def one_layer(layer, indexers, x, selection, config):
  """A dense layer, the first of its model. Returns the next hidden states and its selection."""
  table = rope_table(POSITIONS, config.qk_rope_head_dim, config.rope_theta)
  normed = rms_norm(x, layer["attention_norm"], config.rms_norm_eps)
  out, _, selection = latent_layer(
    layer["attention"], normed, table, config, packed_latent_attend(config, SEGMENTS), jnp.int32(0), None,
    common={"indexer_layers": indexers}, passed=selection,
  )  # fmt: skip
  x = x + out
  return x + feed_forward(layer["mlp"], rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)), selection


def test_shared_layers_read_what_the_last_full_layer_chose():
  """The scanned trunk against a loop over its layers with the indexers dealt out by hand."""
  config = dataclasses.replace(
    toy.CONFIG, num_layers=6, indexer_types=("full", "shared", "full", "full", "shared", "shared")
  )
  params = toy.random_params(param_specs(config))
  full, shared = (
    dataclasses.replace(config, indexer_types=(kind, other)) for kind, other in (("full", "shared"), ("shared", "full"))
  )
  x, selections = params["embed"][IDS], [jnp.zeros((2, toy.LENGTH, toy.CONFIG.index_topk), jnp.int32)]
  for number, indexer in enumerate([0, None, 1, 2, None, None]):
    layer = jax.tree.map(lambda leaf, number=number: leaf[number], params["dense_layers"])
    stack = jax.tree.map(lambda leaf, i=indexer or 0: leaf[i : i + 1], params["indexer_layers"])
    x, selection = one_layer(layer, stack, x, selections[-1], shared if indexer is None else full)
    selections.append(selection)
  expected = rms_norm(x, params["final_norm"], config.rms_norm_eps)
  np.testing.assert_allclose(hidden_of(params, config), expected, atol=1e-4)
  same = [bool(jnp.array_equal(a, b)) for a, b in zip(selections, selections[1:])]
  assert same == [False, True, False, False, True, True]  # the full ones do choose differently


def test_remat_and_scanning_change_nothing():
  params = toy.random_params(param_specs(SHARED))
  grad = jax.jit(jax.grad(lambda p, c: jnp.sum(jnp.sin(hidden_of(p, c)))), static_argnums=1)
  expected = grad(params, SHARED)
  full = dataclasses.replace(SHARED, remat="full")
  close = lambda got, expected: jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, expected
  )
  close(grad(params, full), expected)

  # Leaves that no gradient is wanted of, among others that are trained.
  fixed = {name: leaf for name, leaf in params["moe_layers"].items() if name != "moe"}
  some = lambda moe: jnp.sum(jnp.sin(hidden_of(params | {"moe_layers": fixed | {"moe": moe}}, full)))
  close(jax.jit(jax.grad(some))(params["moe_layers"]["moe"]), expected["moe_layers"]["moe"])
  assert all(np.any(leaf) for leaf in jax.tree.leaves(expected["dense_layers"]))
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(expected["indexer_layers"]))


def test_the_backward_pass_chooses_no_positions_again():
  """Also where only inputs are kept, if layers pass choices on."""

  def gradient(remat, others):
    config = dataclasses.replace(toy.CONFIG, num_layers=6, remat=remat, **others)
    params = toy.random_params(param_specs(config))
    return str(jax.make_jaxpr(jax.grad(lambda params: jnp.sum(hidden_of.__wrapped__(params, config))))(params))

  by_kind = {"each chooses": ({}, 2), "some are passed on": ({"indexer_types": ("full", "shared", "shared") * 2}, 1)}
  for others, in_full in by_kind.values():
    texts = {remat: gradient(remat, others) for remat in ("none", "full", "attention", "dots", "offload")}
    counts = {remat: text.count("population_count") for remat, text in texts.items()}
    assert counts == {remat: counts["none"] * (in_full if remat == "full" else 1) for remat in texts}

  # One selection of every layer is kept, and not also the one that it was passed; with "full" one of those that choose,
  # and the one before the first.
  kept = lambda text: set(re.findall(rf":i32\[(\d),2,{toy.LENGTH},{toy.CONFIG.index_topk}\]", text))
  assert max(kept(texts["full"])) == "3"
  assert max(kept(texts["dots"])) == "6" and texts["dots"].count(":i32[6,2,") == 1


def test_sharded_equals_one_device():
  config = dataclasses.replace(SHARED, vocab_size=12, num_layers=2, indexer_types=("full", "shared"), index_topk=3)
  specs = param_specs(config)
  params = jax.tree.map(lambda x: x + 0.1 * jnp.sin(x * 1e4), init_params(specs, jax.random.key(0)))
  expected = loss_and_gradients("policy", config, None)(params, make_batch())
  mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
  layout = Layout(mesh)
  check_mesh_divides_model(layout, specs)
  batch = jax.device_put(make_batch(), layout.sharding("batch", "sequence"))
  sharded = jax.device_put(params, layout.param_shardings(specs))
  got = loss_and_gradients("policy", config, mesh)(sharded, batch)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
