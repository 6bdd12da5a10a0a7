"""A train state of published size is split over every mesh axis but "data": parameters, moments, masters."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest
from jax.sharding import AbstractMesh
from toys import training_toy

from sao_jax.config import CriticConfig, LoRAConfig
from sao_jax.huggingface.published import PUBLISHED
from sao_jax.learner import setup
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import AXES, check_mesh_divides_model
from sao_jax.parallel.params import path_name

LARGE = 16 * 2**20  # elements of a whole leaf: smaller ones (norms, biases, routers) may be on every device
NARROW = ("router", "q_a", "kv_a", "indexer_layers/q", "indexer_layers/weights")  # too narrow for "tensor"
SIZES = {"no tensor": (2, 4, 8, 1, 8), "tensor": (2, 4, 4, 2, 2)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3-30B-A3B", "GLM-4.5-Air", "GLM-5.2"])
def test_no_large_leaf_is_held_twice(name, sizes):
  layout = Layout(AbstractMesh(sizes, AXES))
  model = dataclasses.replace(PUBLISHED[name].model, param_dtype="bfloat16")
  config = dataclasses.replace(training_toy.get_config(), model=model)
  networks = {"policy": setup.make_policy(config, layout), "critic": setup.make_critic(config, layout, freeze=False)}
  adapted = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoRAConfig(rank=64)))
  networks["lora"] = setup.make_policy(adapted, layout)
  devices = layout.mesh.size // layout.mesh.shape["data"]
  for kind, network in networks.items():
    check_mesh_divides_model(layout, network.specs)
    held = in_all = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(setup.abstract_network(network, layout)):
      path, parts = path_name(path), leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))
      if "lora/" not in path:  # a factor's rank is not split: it is as small as it is
        expected = devices // layout.shards("heads") if path.endswith(NARROW) else devices
        assert parts == expected or leaf.size < LARGE, (kind, path, leaf.shape, leaf.sharding.spec)
        held, in_all = held + leaf.size / parts, in_all + leaf.size
    assert held < 1.02 * in_all / devices, kind


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3-30B-A3B", "GLM-5.2"])
def test_a_critic_on_the_policys_base_holds_a_little_and_its_factors_lie_where_their_matrices_do(name, sizes):
  layout = Layout(AbstractMesh(sizes, AXES))
  model = dataclasses.replace(PUBLISHED[name].model, lora=LoRAConfig(rank=16))
  config = dataclasses.replace(training_toy.get_config(), model=model, critic=CriticConfig(LoRAConfig(rank=16)))
  network, policy = setup.make_critic(config, layout), setup.make_policy(config, layout)
  check_mesh_divides_model(layout, network.specs)
  critic, of_policy = (setup.abstract_network(each, layout) for each in (network, policy))
  size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  assert size(critic) < 0.1 * size(of_policy.params)

  # A is split as the inputs of its matrix are, B as the outputs.
  shard = lambda leaf: leaf.sharding.shard_shape(leaf.shape)
  leaves = lambda tree: {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
  matrices, a, b = map(leaves, (of_policy.params, *(critic.params["lora"][factor] for factor in ("a", "b"))))
  for path in a:
    inputs, matrix = a[path].ndim - 1, shard(matrices[path])
    assert shard(a[path])[:-1] == matrix[:inputs] and shard(b[path])[inputs - len(matrix) :] == matrix[inputs:], path
  assert any(shard(leaf) != leaf.shape for leaf in a.values()) and a.keys() == b.keys()
