"""From a RunConfig to the pieces of a run: devices, mesh, networks, optimisers, initial parameters, sharded state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sao_jax.algorithm.frozen import trainable_leaves
from sao_jax.algorithm.optimizer import make_optimizer
from sao_jax.algorithm.train_step import TrainStep, init_train_state, make_train_step
from sao_jax.algorithm.value_loss import make_value_head
from sao_jax.config import MeshConfig, RunConfig
from sao_jax.errors import ConfigError
from sao_jax.models.critic import critic_specs, frozen_critic_paths, make_critic_apply
from sao_jax.models.lora import lora_scale, lora_specs, merge_lora
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.router import router_bias_paths, update_router_bias
from sao_jax.models.sparse_attention import indexer_paths
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import check_mesh_divides_model, make_mesh
from sao_jax.parallel.params import abstract_params, init_params, path_name, path_names
from sao_jax.parallel.publish import make_publish
from sao_jax.types import NetworkState, PyTree, TrainState

LAG_BINS = 8  # of the metrics by lag, at least


@dataclasses.dataclass(frozen=True)
class Learner:
  """The static half of training: what never changes between steps.

  Attributes:
    config: the run's configuration.
    mesh: the learner's mesh.
    policy_specs, value_specs: parameter declarations of the two networks.
    policy_apply, value_apply: what the two networks compute of a batch.
    policy_optimizer, value_optimizer: optax transformations.
    frozen_paths: leaves of the value network that do not train.
    frozen_policy_paths: and of the policy.
  """

  config: RunConfig
  mesh: Mesh
  policy_specs: PyTree
  value_specs: PyTree
  policy_apply: Callable
  value_apply: Callable
  policy_optimizer: optax.GradientTransformation
  value_optimizer: optax.GradientTransformation
  frozen_paths: frozenset[str]
  frozen_policy_paths: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Devices:
  """Who learns and who samples: the same devices (`shared`) or two sets of local ones (`split`)."""

  learner: tuple[Any, ...]
  sampler: tuple[Any, ...]


def local_devices() -> tuple[Any, ...]:
  """The devices of this process."""
  return tuple(jax.local_devices())


def place(config: RunConfig) -> Devices:
  """Applies `rollout.placement`: with `split` the last `rollout.sampler_devices` local devices sample."""
  local = local_devices()
  if config.rollout.placement == "shared":
    return Devices(local, local)
  count = config.rollout.sampler_devices
  return Devices(local[:-count], local[-count:])


def make_learner(config: RunConfig, devices: tuple[Any, ...] | None = None, *, freeze: bool = True) -> Learner:
  """Builds the learner on `devices` (default: those that `place` gives it).

  `freeze=False` trains the critic's attention too: value pretraining, before RL.
  """
  mesh = make_mesh(config.mesh, devices or place(config).learner)
  layout = Layout(mesh)
  algorithm = config.algorithm
  head = make_value_head(algorithm)
  policy_specs = base_specs = param_specs(config.model)
  frozen_policy = indexer_paths(config.model) | router_bias_paths(config.model)
  if config.model.lora.rank:
    policy_specs = base_specs | {"lora": lora_specs(base_specs, config.model.lora)}
    frozen_policy = frozenset({*path_names(base_specs), "lora/scale"})
  value_specs = critic_specs(config.model, head.num_outputs, algorithm.value_head_initializer)
  for specs in (policy_specs, value_specs):
    check_mesh_divides_model(layout, specs)
  policy_apply = make_policy_apply(
    config.model,
    temperature=config.sampler.temperature,
    chunk=algorithm.logprob_chunk,
    layout=layout,
  )
  frozen = frozen_critic_paths(
    config.model,
    attention=freeze and algorithm.freeze_attention,
    router=freeze and algorithm.freeze_router,
    embeddings=freeze and algorithm.freeze_embeddings,
  )
  return Learner(
    config=config,
    mesh=mesh,
    policy_specs=policy_specs,
    value_specs=value_specs,
    policy_apply=policy_apply,
    value_apply=make_critic_apply(config.model, layout=layout),
    policy_optimizer=make_optimizer(config.policy_optimizer),
    value_optimizer=make_optimizer(config.critic_optimizer, algorithm.value_updates),
    frozen_paths=frozen,
    frozen_policy_paths=frozen_policy,
  )


def rows_multiple(learner: Learner) -> int:
  """What the number of packed rows of a batch must be a multiple of: micro-batches times data shards."""
  return learner.config.algorithm.micro_batches * Layout(learner.mesh).shards("batch")


def init_sharded(specs: PyTree, mesh: Mesh, seed: int) -> PyTree:
  """Initial parameters, created on the mesh."""
  shardings = Layout(mesh).param_shardings(specs)
  return jax.jit(lambda key: init_params(specs, key), out_shardings=shardings)(jax.random.key(seed))


def init_policy_params(learner: Learner, seed: int) -> PyTree:
  """Random policy parameters, created sharded."""
  return init_sharded(learner.policy_specs, learner.mesh, seed)


def sharded_specs(specs: PyTree, mesh: Mesh) -> PyTree:
  """The abstract parameters with their shardings on `mesh`, as a checkpoint is restored onto."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    abstract_params(specs),
    Layout(mesh).param_shardings(specs),
  )


def _initialize(learner: Learner, policy_params: PyTree, value_params: PyTree) -> TrainState:
  return init_train_state(
    policy_params,
    value_params,
    learner.policy_optimizer,
    learner.value_optimizer,
    learner.frozen_paths,
    learner.frozen_policy_paths,
  )


def abstract_state(learner: Learner) -> TrainState:
  """Shapes, dtypes and shardings of the train state; optimiser moments live where their parameters live."""
  shapes = jax.eval_shape(
    lambda p, v: _initialize(learner, p, v), abstract_params(learner.policy_specs), abstract_params(learner.value_specs)
  )
  replicated = NamedSharding(learner.mesh, PartitionSpec())

  def shard(tree: PyTree, specs: PyTree) -> PyTree:
    # A leaf belongs to a parameter when its path ends with the parameter's name, as in mu/<name>.
    named = {
      path_name(path): sharding
      for path, sharding in jax.tree_util.tree_leaves_with_path(Layout(learner.mesh).param_shardings(specs))
    }

    def place_leaf(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      parts = path_name(path).split("/")
      names = ("/".join(parts[start:]) for start in range(len(parts)))
      sharding = next((named[name] for name in names if name in named), replicated)
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place_leaf, tree)

  return TrainState(
    policy=shard(shapes.policy, learner.policy_specs),
    critic=shard(shapes.critic, learner.value_specs),
    policy_version=jax.ShapeDtypeStruct((), shapes.policy_version.dtype, sharding=replicated),
  )


def make_state(learner: Learner, policy_params: PyTree, value_params: PyTree) -> TrainState:
  """The train state at version 0 with fresh optimisers, sharded on the learner's mesh; it owns all its buffers."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(learner))
  return jax.jit(lambda p, v: _initialize(learner, p, v), out_shardings=shardings)(policy_params, value_params)


def make_step(learner: Learner, *, update_policy: bool = True) -> TrainStep:
  """The jitted, donated train step on the learner's mesh; with `update_policy=False` it trains the critic alone."""
  algorithm = learner.config.algorithm
  rate = algorithm.router_bias_update
  return make_train_step(
    algorithm,
    learner.policy_apply,
    learner.value_apply,
    learner.policy_optimizer,
    learner.value_optimizer,
    frozen_value_paths=learner.frozen_paths,
    frozen_policy_paths=learner.frozen_policy_paths,
    update_policy=update_policy,
    balance_routers=functools.partial(update_router_bias, rate=rate) if rate else None,
    max_lag=max(LAG_BINS, learner.config.rollout.max_staleness),
    state_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state(learner)),
  )


def make_network(learner: Learner, policy_params: PyTree) -> NetworkState:
  """The policy alone with a fresh optimiser, sharded on the learner's mesh; it owns all its buffers."""
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(learner).policy)
  optimizer = learner.policy_optimizer
  leaves = lambda p: trainable_leaves(p, learner.frozen_policy_paths)
  start = lambda p: NetworkState(p, optimizer.init(leaves(p)), jnp.zeros((), jnp.int32))
  return jax.jit(start, out_shardings=shardings)(policy_params)


def make_sampler_mesh(config: RunConfig, devices: tuple[Any, ...]) -> Mesh | None:
  """The sampler's mesh: the learner's layout when they share devices, otherwise slots spread over its own devices."""
  if len(devices) == 1:
    return None
  layout = config.mesh if config.rollout.placement == "shared" else MeshConfig(data=-1, fsdp=1)
  return make_mesh(layout, devices)


def make_publisher(learner: Learner) -> Callable[[PyTree], PyTree]:
  """publish(params) -> the sampler's own copy of the policy on its devices, never aliasing the training tree.

  What LoRA trains is merged into it.
  """
  devices = place(learner.config).sampler
  sampler_mesh = make_sampler_mesh(learner.config, devices)
  specs = {name: spec for name, spec in learner.policy_specs.items() if name != "lora"}
  if sampler_mesh is None:
    target = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(devices[0]), specs)
  else:
    target = Layout(sampler_mesh).param_shardings(specs)
  dtypes = jax.tree.map(lambda spec: spec.compute_dtype or learner.config.model.dtype, specs)
  return make_publish(target, dtypes, prepare=merge_lora)


def add_fresh_lora(learner: Learner, params: PyTree, seed: int) -> PyTree:
  """Policy parameters with LoRA's factors at their start, where the learner trains any and `params` have none."""
  if "lora" in params or "lora" not in learner.policy_specs:
    return params
  return params | init_sharded({"lora": learner.policy_specs["lora"]}, learner.mesh, seed)


def check_lora_scale(config: RunConfig, params: PyTree) -> None:
  """Refuses policy parameters whose factors were trained with another scale than the configuration has.

  Raises:
    ConfigError: naming the alpha that they belong to.
  """
  lora = config.model.lora
  if "lora" in params and float(params["lora"]["scale"]) != np.float32(lora_scale(lora)):
    alpha = float(params["lora"]["scale"]) * lora.rank
    raise ConfigError(
      "model.lora.alpha",
      f"{lora.alpha} was set, the factors in the checkpoint belong to {alpha:g}.",
      f"Set model.lora.alpha={alpha:g}.",
    )
