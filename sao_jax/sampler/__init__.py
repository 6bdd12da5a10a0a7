"""Continuous-batching generation in JAX: a cache in slots or pages, prefill and decode, the scheduler, the service.

Published parameters and requests (token ids to continue, limits) enter; completions leave: token ids, each with its
log-probability and policy version. The room knows neither environments nor training.
"""

from __future__ import annotations

from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import Completion, GenerateRequest
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService

__all__ = ["Completion", "Engine", "GenerateRequest", "SamplerService", "SamplingRule", "Scheduler"]
