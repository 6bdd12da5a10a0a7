"""The sampler side of a run: one engine on its devices, behind a service thread."""

from __future__ import annotations

from sao_jax.config import RunConfig
from sao_jax.learner.setup import make_sampler_mesh, place
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService
from sao_jax.types import PyTree


def make_service(
  config: RunConfig,
  params: PyTree,
  *,
  seed: int,
  version: int = 0,
  warm_up: bool = False,
  record_experts: bool = False,
) -> SamplerService:
  """A sampler service (not started) that holds `params`, the sampler's own copy, as policy version `version`.

  `warm_up` compiles all its programs now, so that none compiles in the middle of a long run. `record_experts`: what it
  samples brings its routed experts along.
  """
  mesh = make_sampler_mesh(config, place(config).sampler)
  engine = Engine(
    params, config.model, config.sampler, seed=seed, version=version, record_experts=record_experts, mesh=mesh
  )
  if warm_up:
    engine.warm_up(prefixes=config.rollout.max_turns > 1)
  return SamplerService(Scheduler(engine))
