"""The description of a kind of attention: all that the transformer, the critic and LoRA ask about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.parallel.layout import ONE_DEVICE, Layout
from sao_jax.parallel.params import Params, Specs

# Says what the queries of a call read. Packed rows and the sampler's cache make one, a layer of the same kind uses it;
# nobody else looks inside.
Attend = Any

# The name (`jax.ad_checkpoint.checkpoint_name`) of what attention gives and of the logarithms of its sums: with these
# the backward pass need not compute it again; `transformer.rematerialize` chooses.
ATTENTION_OUT = "attention_out"
# The name of what a layer passes to the next one: kept in place of what it was passed, it costs no memory.
PASSED = "passed"


@runtime_checkable
class AttentionLayer(Protocol):
  """The attention of one layer: projections, rotary embedding, `attend`, output projection."""

  def __call__(
    self,
    params: Params,
    x: Float[Array, "B T D"],
    table: tuple[jax.Array, jax.Array],
    config: ModelConfig,
    attend: Attend,
    layer_index: jax.Array,
    carry: Any,
    *,
    common: Params,
    passed: Any,
    chosen: bool = False,
    layout: Layout = ONE_DEVICE,
  ) -> tuple[Float[Array, "B T D"], Any, Any]:
    """Returns the output, the next carry and what is passed to the next layer.

    Args:
      params: the layer's parameters, as `AttentionKind.specs` declares them.
      x: normalised hidden states.
      table: cos and sin of the rotary angles of the tokens.
      config: static.
      attend: says what the queries read.
      layer_index: the layer's index, traced; a number in straight code.
      carry: the state of `attend`, for example a cache.
      common: the parameters of `AttentionKind.common_specs`.
      passed: what the layer before has passed on; of the first layer `AttentionKind.start`.
      chosen: `passed` is what this layer itself passes on, found again by the backward pass.
      layout: the one that parameters and tokens are placed by.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionKind:
  """One kind of attention. `sampler.caches` adds the cache that it samples with.

  Attributes:
    specs: (config) -> the parameters of one layer, the group "attention".
    layer: the attention of one layer.
    packed: (config, segment_ids [B, T], layout) -> the `attend` of packed rows: causal within segments.
    rotary_dim: (config) -> the number of rotated dimensions of a head.
    names: every name in `specs`, explicitly; the critic freezes these during RL.
    matrices: the names that LoRA can adapt, and how many axes of each are inputs; a name means the same in every kind.
    common_specs: (config) -> groups of parameters that no single layer owns, {} for none.
    start: (config, attend, B, T) -> what is passed to the first layer.
    replaces: (config) -> for every layer, does it replace what it is passed? Read only where `start` is not None.
    fixed: (config) -> full names of the leaves that no gradient reaches: nothing trains them.
  """

  specs: Callable[[ModelConfig], Specs]
  layer: AttentionLayer
  packed: Callable[[ModelConfig, Int[Array, "B T"], Layout], Attend]
  rotary_dim: Callable[[ModelConfig], int]
  names: tuple[str, ...]
  matrices: Mapping[str, int]
  common_specs: Callable[[ModelConfig], Specs] = lambda config: {}
  start: Callable[[ModelConfig, Attend, int, int], Any] = lambda config, attend, batch, length: None
  replaces: Callable[[ModelConfig], tuple[bool, ...]] = lambda config: ()
  fixed: Callable[[ModelConfig], frozenset[str]] = lambda config: frozenset()
