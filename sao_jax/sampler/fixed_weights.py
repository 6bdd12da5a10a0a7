"""Sampling with weights that stay as they are, in the slots of an engine that goes on to newer ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax

from sao_jax.parallel.params import Params

if TYPE_CHECKING:
  from sao_jax.sampler.requests import Completion, GenerateRequest
  from sao_jax.sampler.service import SamplerService


class Weights(NamedTuple):
  """A policy to sample with.

  Attributes:
    params: its parameters, on the engine's devices.
    version: its policy version.
    key: of its random numbers.
  """

  params: Params
  version: int
  key: jax.Array


class FixedSampler:
  """The part of a service that a rollout needs, with weights and random numbers of its own.

  Its turns share the slots, and so the cache, with those of everybody else; a dispatch samples with one policy only.
  """

  def __init__(self, service: SamplerService, params: Params, version: int, seed: int):
    """`seed` determines the random numbers, together with the rollout ids.

    Raises:
      ConfigError: the parameters are of another model.
    """
    service.check_params(params)
    self._service = service
    self._weights = Weights(params, version, jax.random.key(seed))

  @property
  def progress(self) -> object:
    """See `SamplerService`; that of others in the same slots is in it."""
    return self._service.progress

  def new_session(self) -> int:
    """See `SamplerService`."""
    return self._service.new_session()

  def release(self, session_id: int) -> None:
    """See `SamplerService`."""
    self._service.release(session_id)

  async def generate(self, request: GenerateRequest) -> Completion:
    """See `SamplerService`."""
    return await self._service.generate(dataclasses.replace(request, weights=self._weights))
