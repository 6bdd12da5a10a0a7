"""The learner of a RunConfig: mesh, the two networks, their sharded state, and the train step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sao_jax.algorithm.masters import with_masters
from sao_jax.algorithm.network import Network
from sao_jax.algorithm.optimizer import make_optimizer
from sao_jax.algorithm.train_step import TrainStep, init_train_state, make_train_step
from sao_jax.algorithm.value_loss import make_value_head
from sao_jax.config import RolloutConfig, RunConfig
from sao_jax.errors import ConfigError
from sao_jax.learner.placement import Devices, check_sampler_mesh, place
from sao_jax.models.critic import critic_specs, frozen_critic_paths, make_critic_apply
from sao_jax.models.critic_lora import critic_lora_specs, frozen_lora_paths, join_base
from sao_jax.models.lora import lora_specs
from sao_jax.models.policy import make_policy_apply
from sao_jax.models.router import update_router_bias
from sao_jax.models.transformer import fixed_paths, param_specs
from sao_jax.parallel.agreement import Processes, all_processes
from sao_jax.parallel.layout import Layout
from sao_jax.parallel.mesh import check_mesh_divides_model, make_mesh
from sao_jax.parallel.params import abstract_params, init_params, path_name, path_names
from sao_jax.parallel.process import DataShare
from sao_jax.types import NetworkState, PolicyOutputs, PyTree, TrainState


@dataclasses.dataclass(frozen=True)
class Learner:
  """The static half of training, which never changes between steps.

  Attributes:
    config: the run's configuration.
    layout: the learner's mesh, and where arrays live on it.
    policy: the policy network.
    critic: the value network; None where `algorithm.advantage` needs none.
    processes: those that run together.
    devices: those that learn and those that sample.
  """

  config: RunConfig
  layout: Layout
  policy: Network
  critic: Network | None
  processes: Processes
  devices: Devices

  @property
  def mesh(self) -> Mesh:
    """The devices that learn."""
    return self.layout.mesh

  @property
  def learns(self) -> bool:
    """True if this process has devices that learn; without, states are abstract here."""
    return self.layout.is_here

  @property
  def share(self) -> DataShare:
    """The share of the data that this process brings."""
    return self.devices.share


def make_learner(config: RunConfig, devices: tuple[Any, ...] | None = None, *, freeze: bool = True) -> Learner:
  """Builds the learner on `devices` (default: those that `place` gives it).

  `freeze=False` trains the critic's attention too: value pretraining, before RL.

  Raises:
    ConfigError: the mesh does not fit the devices, or does not divide the model.

  >>> from sao_jax.config import ModelConfig
  >>> from sao_jax.environments.calculator import Calculator
  >>> config = RunConfig(Calculator(), model=ModelConfig(num_layers=1, d_model=8, d_ff=16))
  >>> learner = make_learner(config, tuple(jax.devices()[:1]))
  >>> learner.mesh.size, learner.critic.specs["value_head"].shape
  (1, (8, 1))
  >>> "dense_layers/attention/k" in learner.critic.frozen, "dense_layers/attention/k" in learner.policy.frozen
  (True, False)
  """
  placed = place(config)
  check_shares(config, placed.share.count)
  layout = Layout(make_mesh(config.mesh, devices or placed.learner))
  policy = make_policy(config, layout)
  critic = make_critic(config, layout, freeze=freeze) if config.algorithm.needs_critic else None
  for network in filter(None, (policy, critic)):
    check_mesh_divides_model(layout, network.specs)
  check_sampler_mesh(config, {name: spec for name, spec in policy.specs.items() if name != "lora"})
  return Learner(config, layout, policy, critic, all_processes(), placed)


def check_shares(config: RunConfig, num_processes: int) -> None:
  """Refuses batches of which not every process that samples can bring the same share.

  Raises:
    ConfigError: naming the field.
  """
  group = config.rollout.group_size
  # The numbers that count what all samplers bring together, and the parts that each must divide into.
  shares = [("rollout.batch_size", config.rollout.batch_size, num_processes * group)]
  shares += [("rollout.row_counts", count, num_processes) for count in config.rollout.row_counts]
  if hasattr(config.environment, "demonstration"):
    shares.append(("sft.batch_size", config.sft.batch_size, num_processes))

  for field, number, parts in shares:
    if number % parts:
      groups = f" with groups of {group}" if parts > num_processes else ""
      problem = f"{number}, which is of all samplers together, does not divide over {num_processes}{groups}."
      raise ConfigError(field, problem, f"Make it a multiple of {parts}.")


def share_of_batch(config: RunConfig, num_processes: int) -> RolloutConfig:
  """Returns the rollout configuration of one of the processes that sample, which brings its share of every batch."""
  rollout = config.rollout
  return dataclasses.replace(rollout, batch_size=rollout.batch_size // num_processes)


def make_policy(config: RunConfig, layout: Layout) -> Network:
  """Makes the policy. With LoRA only its factors train; router biases have no gradient, but may follow the load."""
  # Parameters, and those among them that the optimiser must not touch.
  specs = base_specs = param_specs(config.model)
  frozen = fixed_paths(config.model)
  if config.model.lora.rank:
    specs = base_specs | {"lora": lora_specs(base_specs, config.model.lora)}
    frozen = frozenset({*path_names(base_specs), "lora/scale"})

  # The routers' biases follow their load, after each gradient step.
  rate = config.algorithm.router_bias_update

  def balance_routers(params: PyTree, outputs: PolicyOutputs) -> PyTree:
    return update_router_bias(params, jnp.sum(outputs.router.load, axis=0), rate=rate)

  return Network(
    specs=specs,
    apply=make_policy_apply(
      config.model,
      temperature=config.sampler.temperature,
      chunk=config.algorithm.logprob_chunk,
      layout=layout,
    ),
    optimizer=with_masters(make_optimizer(config.policy_optimizer)),
    frozen=frozen,
    after_update=balance_routers if rate else None,
  )


def make_critic(config: RunConfig, layout: Layout, *, freeze: bool = True) -> Network:
  """Makes the critic; `freeze=False` ignores the frozen sets of `algorithm`.

  With LoRA its factors and head train, and it shares the base of a policy with LoRA.
  """
  # Parameters, and those among them that the optimiser must not touch.
  algorithm, shares = config.algorithm, config.shares_base
  specs = critic_specs(
    config.model,
    make_value_head(algorithm).num_outputs,
    algorithm.value_head_initializer,
    reads_logprobs=algorithm.critic_reads_logprobs,
  )
  frozen = frozen_critic_paths(
    config.model,
    attention=freeze and algorithm.freeze_attention,
    router=freeze and algorithm.freeze_router,
    embeddings=freeze and algorithm.freeze_embeddings,
  )
  if config.critic.lora.rank:
    specs = critic_lora_specs(config.model, specs, config.critic.lora, shares_base=shares)
    frozen = frozen_lora_paths(specs, frozen)

  return Network(
    specs=specs,
    apply=make_critic_apply(config.model, layout=layout),
    optimizer=with_masters(make_optimizer(config.critic_optimizer, algorithm.value_updates)),
    frozen=frozen,
    join=join_base if shares else None,
  )


def rows_multiple(learner: Learner) -> int:
  """Returns the factor of every number of packed rows: micro-batches times data shards."""
  return learner.config.algorithm.micro_batches * learner.layout.shards("batch")


def micro_batches(learner: Learner, rows: int) -> int:
  """Returns the parts in which a batch is computed: for more `rows` than any of `rollout.row_counts`, more of them."""
  largest = max(learner.config.rollout.row_counts)
  return learner.config.algorithm.micro_batches * max(1, -(-rows // largest))


def init_sharded(specs: PyTree, layout: Layout, seed: int) -> PyTree:
  """Creates initial parameters on the mesh; abstract ones in a process that has no part in it."""
  if not layout.is_here:
    return sharded_specs(specs, layout)
  shardings = layout.param_shardings(specs)
  return jax.jit(lambda key: init_params(specs, key), out_shardings=shardings)(jax.random.key(seed))


def init_policy_params(learner: Learner, seed: int) -> PyTree:
  """Creates random policy parameters on the learner's mesh."""
  return init_sharded(learner.policy.specs, learner.layout, seed)


def sharded_specs(specs: PyTree, layout: Layout) -> PyTree:
  """Returns the abstract parameters with their shardings, onto which a checkpoint is restored."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    abstract_params(specs),
    layout.param_shardings(specs),
  )


def abstract_network(network: Network, layout: Layout) -> NetworkState:
  """Returns shapes, dtypes and shardings of a network's state; moments and masters live where their parameters do."""
  shapes = jax.eval_shape(network.start, abstract_params(network.specs))
  shardings = jax.tree_util.tree_leaves_with_path(layout.param_shardings(network.specs))
  named = {path_name(path): sharding for path, sharding in shardings}
  replicated = layout.sharding()

  def place_leaf(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    # A leaf belongs to a parameter when its path ends with the parameter's name, as in mu/<name>.
    parts = path_name(path).split("/")
    names = ("/".join(parts[start:]) for start in range(len(parts)))
    sharding = next((named[name] for name in names if name in named), replicated)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree_util.tree_map_with_path(place_leaf, shapes)


def abstract_state(learner: Learner) -> TrainState:
  """Returns shapes, dtypes and shardings of the train state."""
  replicated = learner.layout.sharding()
  return TrainState(
    policy=abstract_network(learner.policy, learner.layout),
    critic=None if learner.critic is None else abstract_network(learner.critic, learner.layout),
    policy_version=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
  )


def make_state(learner: Learner, policy_params: PyTree, critic_params: PyTree | None) -> TrainState:
  """Makes the train state at version 0 with fresh optimisers, sharded on the mesh; it owns all its buffers.

  It is abstract in a process that does not learn.
  """
  if not learner.learns:
    return abstract_state(learner)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(learner))
  start = functools.partial(init_train_state, learner.policy, learner.critic)
  return jax.jit(start, out_shardings=shardings)(policy_params, critic_params)


def make_network_state(network: Network, layout: Layout, params: PyTree) -> NetworkState:
  """Makes the state of one network with a fresh optimiser, sharded on the mesh; it owns all its buffers.

  It is abstract in a process that has no part in the mesh.
  """
  if not layout.is_here:
    return abstract_network(network, layout)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_network(network, layout))
  return jax.jit(network.start, out_shardings=shardings)(params)


def make_step(learner: Learner, *, update_policy: bool = True, rows: int = 0) -> TrainStep:
  """Makes the jitted, donated train step on the mesh; with `update_policy=False` it trains the critic alone.

  For batches of more `rows` than any of `rollout.row_counts`, it has as many times more micro-batches.
  """
  return make_train_step(
    dataclasses.replace(learner.config.algorithm, micro_batches=micro_batches(learner, rows)),
    learner.policy,
    learner.critic,
    update_policy=update_policy,
    max_lag=learner.config.rollout.max_staleness,
    state_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state(learner)),
  )
