"""The interface of a layout of the cache to the engine: the state, the calls of its programs, and room."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.prefill import Piece
from sao_jax.sampler.sample_loop import DecodeOutputs
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.state import EngineState


@dataclasses.dataclass(frozen=True)
class Sizes:
  """All that the programs of an engine are compiled for.

  Attributes:
    model: the policy.
    sampler: sizes of slots, cache and calls.
    rule: the tokens that may be drawn.
    cache_dtype: that of the cache.
    keep_experts: record which experts were used for every token.
    layout: the engine's devices.
  """

  model: ModelConfig
  sampler: SamplerConfig
  rule: SamplingRule
  cache_dtype: str
  keep_experts: bool
  layout: Layout


@runtime_checkable
class Programs(Protocol):
  """A layout of the cache. A call has a `shape`, the static sizes of its program.

  `slot_programs` and `page_programs` are the two that there are. Where `reads_prompts`, prompts are read by calls of
  `decode`, piece by piece; elsewhere by calls of their own, for which there are `plan_extend` and `extend` as well.
  """

  sizes: Sizes
  decode_batch: int
  reads_prompts: bool

  def empty_state(self) -> EngineState: ...
  def take_pieces(self, waiting: Sequence[Piece]) -> list[Piece]: ...
  def plan_decode(self, lengths: Mapping[int, int], num_steps: int, pieces: Sequence[Piece] = ()) -> Any: ...
  def idle_calls(self, prefixes: bool) -> Iterator[Any]: ...
  def decode(
    self, weights: Weights, state: EngineState, call: Any, num_steps: int
  ) -> tuple[EngineState, DecodeOutputs, jax.Array | None]: ...
  def reserve(self, slot: int, length: int) -> bool: ...
  def release(self, slot: int) -> None: ...
  def num_free_pages(self, slot: int) -> int: ...
  def share_room(self, slot: int, other: int) -> bool: ...
