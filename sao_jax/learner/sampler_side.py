"""The sampler side of a run: its copy of the policy, and one engine on its devices, behind a service thread."""

from __future__ import annotations

from collections.abc import Callable

import jax

from sao_jax.config import MeshConfig, RunConfig
from sao_jax.learner.placement import make_sampler_mesh, place
from sao_jax.learner.setup import Learner
from sao_jax.models.lora import merge_lora
from sao_jax.parallel.agreement import all_processes
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.parallel.params import Specs, abstract_params
from sao_jax.parallel.publish import cast_copy, make_publish
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.group import make_group_service
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService
from sao_jax.types import PyTree


def make_publisher(learner: Learner) -> Callable[[PyTree], PyTree]:
  """Returns `publish(params)`: the sampler's own copy of the policy on its devices, never aliasing the training tree.

  LoRA's factors are merged into the matrices that they adapt. With several processes all call it together, and each
  gets the copy of its own sampler, {} without one; the parameters of one that does not learn are abstract.
  """
  specs = {name: spec for name, spec in learner.policy.specs.items() if name != "lora"}
  dtypes = jax.tree.map(lambda spec: spec.compute_dtype or learner.config.model.dtype, specs)
  if learner.processes.count > 1:
    return _make_joined_publisher(learner, specs, dtypes)

  devices = learner.devices.sampler
  sampler_mesh = make_sampler_mesh(learner.config, devices)
  if sampler_mesh is None:
    target = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(devices[0]), specs)
  else:
    target = Layout(sampler_mesh, SAMPLER_RULES).param_shardings(specs)
  return make_publish(target, dtypes, prepare=merge_lora)


def _make_joined_publisher(learner: Learner, specs: Specs, dtypes: PyTree) -> Callable[[PyTree], PyTree]:
  """The publisher of several processes: every sampler's devices are a mesh, also a single one."""
  config, placed = learner.config, learner.devices
  groups = [make_sampler_mesh(config, group) or make_mesh(MeshConfig(), group) for group in placed.groups]
  target = Layout(groups[0], SAMPLER_RULES).param_shardings(specs)
  split = learner.layout.param_shardings(specs)
  shapes = jax.eval_shape(cast_copy(dtypes), abstract_params(specs))
  publish_copy = make_publish(target, dtypes, prepare=merge_lora, groups=groups, split=split, shapes=shapes)

  def publish(params: PyTree) -> PyTree:
    copy = publish_copy(params if learner.learns else None)
    if copy is None:
      return {}
    # An engine on a single device has no mesh.
    alone = len(placed.sampler) == 1
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), copy) if alone else copy

  return publish


def make_service(
  config: RunConfig,
  params: PyTree,
  *,
  seed: int,
  version: int = 0,
  warm_up: bool = False,
  keep_experts: bool = False,
) -> SamplerService | FollowingService:
  """Makes a sampler service, not started, that holds `params`, the sampler's own copy, as policy version `version`.

  `warm_up` compiles all its programs now, so that none compiles in the middle of a long run. With `keep_experts` its
  tokens come with the experts that they were routed to.

  Where a sampler's devices are those of several processes, all of them call this together. In those that are not the
  first, the service follows that one, and takes no requests.
  """
  devices = place(config).sampler
  mesh, members = make_sampler_mesh(config, devices), sorted({device.process_index for device in devices})

  def make_engine(make: Callable[..., Engine]) -> Engine:
    options = {"seed": seed, "version": version, "keep_experts": keep_experts, "mesh": mesh}
    return make(params, config.model, config.sampler, **options)

  def warm(engine: Engine) -> None:
    if warm_up:
      engine.warm_up(prefixes=config.rollout.max_turns > 1)

  if len(members) > 1:
    return make_group_service(make_engine, all_processes(), members, warm_up=warm)
  engine = make_engine(Engine)
  warm(engine)
  return SamplerService(Scheduler(engine))
