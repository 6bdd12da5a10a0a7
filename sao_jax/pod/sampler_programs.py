"""Decode and prefill as an engine calls them, lowered for devices that are not here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.config import RunConfig
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import Layout
from sao_jax.sampler.cache_layout import make_programs
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.prefill import PrefillCall
from sao_jax.sampler.programs import Programs
from sao_jax.sampler.state import EngineState, state_shardings
from sao_jax.types import PyTree


class AbstractEngine:
  """The programs of an engine with abstract parameters and state; nothing is allocated.

  Attributes:
    params: the sampler's copy of the policy.
    state: the cache and the slots.
  """

  def __init__(self, config: RunConfig, layout: Layout):
    """`layout` has a mesh, of devices that need not be here."""
    self._config = config
    self._programs: Programs = make_programs(
      config.model, config.sampler, layout, keep_experts=config.algorithm.router_replay
    )
    specs = param_specs(config.model)
    of_param = lambda spec, sharding: jax.ShapeDtypeStruct(
      spec.shape, jnp.dtype(spec.compute_dtype or config.model.dtype), sharding=sharding
    )
    self.params: PyTree = jax.tree.map(of_param, specs, layout.param_shardings(specs))

    shapes = jax.eval_shape(self._programs.empty_state)
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    self.state: EngineState = jax.tree.map(place, shapes, state_shardings(shapes, layout))
    # The largest call of each kind comes last. A dispatch that reads prompts as well stands for the prefill.
    calls = list(self._programs.idle_calls(prefixes=True))
    reads = [isinstance(call, PrefillCall) or getattr(call, "prompts", None) is not None for call in calls]
    self._decode = [call for call, prefill in zip(calls, reads, strict=True) if not prefill][-1]
    self._prefill = [call for call, prefill in zip(calls, reads, strict=True) if prefill][-1]

  def decode(self) -> jax.stages.Lowered:
    """Lowers a dispatch of all decode steps over all slots."""
    steps = self._config.sampler.decode_steps
    return self._lower(lambda weights, state: self._programs.decode(weights, state, self._decode, steps))

  def prefill(self) -> jax.stages.Lowered:
    """Lowers the longest prefill behind the longest prefix, or the dispatch that also reads a chunk of prompts."""
    if isinstance(self._prefill, PrefillCall):
      return self._lower(lambda weights, state: self._programs.extend(weights, state, self._prefill))
    steps = self._config.sampler.decode_steps
    return self._lower(lambda weights, state: self._programs.decode(weights, state, self._prefill, steps))

  def tokens(self, name: str) -> int:
    """Tokens that one run of "decode" or "prefill" samples or writes, on all devices."""
    sampler = self._config.sampler
    if name == "decode":
      return sampler.num_slots * sampler.decode_steps
    call = self._prefill
    return call.rows * call.length if isinstance(call, PrefillCall) else call.prompts.token_ids.size

  def _lower(self, run: Any) -> jax.stages.Lowered:
    """Lowers `run(weights, state)`: what the host hands over is an argument of the program, and no constant of it."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    traced = jax.make_jaxpr(lambda params, state, key: run(Weights(params, 0, key), state), return_shape=True)
    program, shapes = traced(self.params, self.state, key)
    out = jax.tree.structure(shapes)

    def call(host: list[jax.Array], params: PyTree, state: EngineState, key: jax.Array) -> Any:
      leaves = jax.tree.leaves((params, state, key))
      return jax.tree.unflatten(out, jax.core.eval_jaxpr(program.jaxpr, host, *leaves))

    host = [jax.ShapeDtypeStruct(np.shape(array), np.asarray(array).dtype) for array in program.consts]
    return jax.jit(call, donate_argnums=2).lower(host, self.params, self.state, key)
