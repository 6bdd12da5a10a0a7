"""The sampler side of a run: its copy of the policy, and one engine on its devices, behind a service thread."""

from __future__ import annotations

from collections.abc import Callable

import jax

from sao_jax.config import RunConfig
from sao_jax.learner.placement import make_sampler_mesh, place
from sao_jax.learner.setup import Learner
from sao_jax.models.lora import merge_lora
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.publish import make_publish
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService
from sao_jax.types import PyTree


def make_publisher(learner: Learner) -> Callable[[PyTree], PyTree]:
  """Returns `publish(params)`: the sampler's own copy of the policy on its devices, never aliasing the training tree.

  LoRA's factors are merged into the matrices that they adapt.
  """
  devices = place(learner.config).sampler
  sampler_mesh = make_sampler_mesh(learner.config, devices)
  specs = {name: spec for name, spec in learner.policy.specs.items() if name != "lora"}
  if sampler_mesh is None:
    target = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(devices[0]), specs)
  else:
    target = Layout(sampler_mesh, SAMPLER_RULES).param_shardings(specs)
  dtypes = jax.tree.map(lambda spec: spec.compute_dtype or learner.config.model.dtype, specs)
  replicated = learner.layout.sharding() if learner.processes.count > 1 else None
  return make_publish(target, dtypes, prepare=merge_lora, gathered=replicated)


def make_service(
  config: RunConfig,
  params: PyTree,
  *,
  seed: int,
  version: int = 0,
  warm_up: bool = False,
  keep_experts: bool = False,
) -> SamplerService:
  """Makes a sampler service, not started, that holds `params`, the sampler's own copy, as policy version `version`.

  `warm_up` compiles all its programs now, so that none compiles in the middle of a long run. With `keep_experts` its
  tokens come with the experts that they were routed to.
  """
  mesh = make_sampler_mesh(config, place(config).sampler)
  engine = Engine(
    params, config.model, config.sampler, seed=seed, version=version, keep_experts=keep_experts, mesh=mesh
  )
  if warm_up:
    engine.warm_up(prefixes=config.rollout.max_turns > 1)
  return SamplerService(Scheduler(engine))
