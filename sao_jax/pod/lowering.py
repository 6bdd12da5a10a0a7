"""The real programs of a run, lowered for a topology: the train steps, the sampler's decode and prefill, publishing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from sao_jax.config import MeshConfig, ModelConfig, RunConfig
from sao_jax.errors import ConfigError
from sao_jax.learner.batches import abstract_rows
from sao_jax.learner.placement import make_sampler_mesh
from sao_jax.learner.setup import Learner, abstract_state, make_learner, make_step
from sao_jax.models.lora import merge_lora
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.parallel.publish import cast_copy
from sao_jax.pod.chips import topology_devices
from sao_jax.pod.compilations import without_hosts
from sao_jax.pod.model_flops import step_flops, token_flops
from sao_jax.pod.sampler_programs import AbstractEngine
from sao_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Lowered:
  """A program before it is compiled.

  Attributes:
    lower: traces and lowers it.
    mesh: its devices.
    tokens: that one run consumes or samples, on all chips.
    model_flops: that those need, on all chips.
    rounds: of a loop whose length depends on data: decode steps.
    branch_share: share of the layers that take a branch: those with an indexer of their own.
    resident: bytes per chip of what must stay beside it or is its input, by name.
  """

  lower: Callable[[], jax.stages.Lowered]
  mesh: Mesh
  tokens: int
  model_flops: float
  rounds: int
  branch_share: float
  resident: dict[str, int]


def prepare(name: str, config: RunConfig, topology: str, sampler_topology: str) -> Lowered:
  """Prepares one of `compilations.PROGRAMS`: the learner's for `topology`, those of a sampler for its own.

  Raises:
    ConfigError: the configuration does not fit the devices, or it has no such program.
  """
  if name in ("step", "critic_step"):
    return _train_step(config, topology, update_policy=name == "step")
  if name == "publish":
    return _publish(config, topology)
  return _sampler(name, config, sampler_topology)


def bytes_per_chip(tree: PyTree) -> int:
  """Returns the bytes of one device's parts of abstract arrays that have shardings."""
  size = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return sum(map(size, jax.tree.leaves(tree)))


def _indexer_share(model: ModelConfig) -> float:
  """The share of layers with an indexer, 1 where none reads the choice of another."""
  return model.indexer_types.count("full") / model.num_layers if model.indexer_types else 1.0


def _learner(config: RunConfig, topology: str) -> Learner:
  """The learner on all devices of the topology: those that sample elsewhere are none of them."""
  return make_learner(without_hosts(config), topology_devices(topology))


def _train_step(config: RunConfig, topology: str, *, update_policy: bool) -> Lowered:
  """The step on the largest batch that a run compiles for."""
  if not (update_policy or config.algorithm.needs_critic):
    raise ConfigError("--programs", "critic_step: the algorithm has no critic.", "leave it out.")
  learner = _learner(config, topology)
  state = abstract_state(learner)
  rows = max(abstract_rows(learner), key=lambda rows: rows.token_ids.size)
  batch, length = rows.token_ids.shape

  # Rows are full: packing wastes little of them.
  per_token = step_flops(config, length)
  if not update_policy:
    without_critic = dataclasses.replace(config.algorithm, advantage="grpo")
    per_token -= step_flops(dataclasses.replace(config, algorithm=without_critic), length)
  resident = {"policy and its optimiser": bytes_per_chip(state.policy), "batch": bytes_per_chip(rows)}
  if state.critic is not None:
    resident["critic and its optimiser"] = bytes_per_chip(state.critic)
  step, tokens = make_step(learner, update_policy=update_policy, rows=batch), batch * length
  lower = lambda: step.lower(state, rows)
  return Lowered(lower, learner.mesh, tokens, per_token * tokens, 1, _indexer_share(config.model), resident)


def _sampler(name: str, config: RunConfig, topology: str) -> Lowered:
  """Decode over all slots, or the longest prefill."""
  devices, sampler = topology_devices(topology), config.sampler
  mesh = make_sampler_mesh(config, devices) or make_mesh(MeshConfig(), devices)
  engine = AbstractEngine(config, Layout(mesh, SAMPLER_RULES))

  # A sampled token reads a context that is half full; so does a prefill.
  per_token, tokens = token_flops(config.model, sampler.context_length), engine.tokens(name)
  flops = per_token.trunk + (per_token.head if name == "decode" else 0.0)
  return Lowered(
    engine.decode if name == "decode" else engine.prefill,
    mesh,
    tokens,
    flops * tokens,
    sampler.decode_steps if name == "decode" else 1,
    _indexer_share(config.model),
    {"parameters": bytes_per_chip(engine.params), "cache and slots": bytes_per_chip(engine.state)},
  )


def _publish(config: RunConfig, topology: str) -> Lowered:
  """The sampler's copy of the policy, made on the learner's devices; for samplers elsewhere, before it travels."""
  learner = _learner(config, topology)
  params = abstract_state(learner).policy.params
  specs = {name: spec for name, spec in learner.policy.specs.items() if name != "lora"}
  dtypes = jax.tree.map(lambda spec: spec.compute_dtype or config.model.dtype, specs)
  own_mesh = config.sampler.mesh is not None or config.rollout.placement == "split"
  target = (learner.layout if own_mesh else Layout(learner.mesh, SAMPLER_RULES)).param_shardings(specs)
  publish = jax.jit(cast_copy(dtypes, merge_lora), out_shardings=target)
  resident = {"policy": bytes_per_chip(params)}
  return Lowered(lambda: publish.lower(params), learner.mesh, 0, 0.0, 1, 1.0, resident)
