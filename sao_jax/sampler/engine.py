"""The engine: parameters, device state and the two jitted programs behind a small host interface.

It knows slots and tokens; who waits for which slot is the scheduler's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from sao_jax.announce import announced
from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.configuration.bounds import check_bounds
from sao_jax.errors import ConfigError
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.params import Params, path_name
from sao_jax.sampler import buckets, steps
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.prefill import Extension, PrefillCall, plan_calls
from sao_jax.sampler.sampling import SamplingRule
from sao_jax.sampler.state import empty_state


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """One decode call, perhaps still running on the device.

  Attributes:
    slots: the slot of each of the R rows; num_slots marks an unused row.
    version: the version of the parameters that it samples with.
    outputs: device arrays.
  """

  slots: Int[np.ndarray, " R"]
  version: int
  outputs: steps.DecodeOutputs

  def fetch(
    self,
  ) -> tuple[
    Int[np.ndarray, "N R"],
    Float[np.ndarray, "N R"],
    Bool[np.ndarray, "N R"],
    Bool[np.ndarray, " R"],
    Int[np.ndarray, "N R L k"] | None,
  ]:
    """Waits, and returns tokens, logprobs, emitted, overflow and routed experts as host arrays."""
    outputs = jax.device_get(self.outputs)
    return outputs.tokens, outputs.logprobs, outputs.emitted, outputs.overflow, outputs.routed_experts


@dataclasses.dataclass(frozen=True)
class Prefill:
  """One extend call of an engine that records experts, perhaps still running on the device."""

  call: PrefillCall
  routed_experts: jax.Array  # int16 [P, T, L, k]

  def fetch(self) -> Iterator[tuple[int, int, Int[np.ndarray, "n L k"]]]:
    """Waits, and yields slot, index in the context of the first token, and the experts of the tokens written."""
    experts = jax.device_get(self.routed_experts)
    for row, piece in enumerate(self.call.pieces):
      yield piece.extension.slot, piece.start, experts[row, : piece.count]


class Engine:
  """Slots on a device, or on a mesh. Not thread-safe: one thread drives it.

  Attributes:
    params: the policy that the next dispatch uses.
    version: its policy version.
    config: sizes of slots, cache and calls.
    vocab_size: token ids lie below it.
    compiling: a program is called for the first time, which compiles it.
    routed_shape: (L, k), the shape of a token's routed experts; None: they are not recorded.
  """

  def __init__(
    self,
    params: Params,
    model_config: ModelConfig,
    sampler_config: SamplerConfig,
    *,
    seed: int,
    version: int = 0,
    keep_experts: bool = False,
    mesh: Mesh | None = None,
  ):
    """`params` must not be donated to anything while the engine holds them. On a mesh they are already sharded.

    `keep_experts` keeps which experts were used for every token; only for models with experts.

    Raises:
      ConfigError: a size is out of its bounds, or the slots do not split over the mesh.
    """
    check_bounds(sampler_config, "sampler.")
    self._layout = Layout(mesh, SAMPLER_RULES)
    shards = self._layout.shards("slots")
    buckets.check_slots(sampler_config, shards)

    self.params, self.version, self.vocab_size = params, version, model_config.vocab_size
    self.config, self._num_slots = sampler_config, sampler_config.num_slots
    self.routed_shape = model_config.routed_shape if keep_experts else None
    self._model_config = model_config
    self._key = jax.random.key(seed)
    self._rule = SamplingRule(top_p=sampler_config.top_p, top_k=sampler_config.top_k)

    # Every static shape that a program is compiled for, and those that it was called with.
    self._windows = buckets.window_buckets(sampler_config)
    self._prefixes = buckets.prefix_windows(sampler_config)
    self._lengths = buckets.prefill_buckets(sampler_config)
    self._prefill_batches = buckets.prefill_batches(sampler_config) if shards == 1 else (shards,)
    self._decode_batches = buckets.decode_batches(sampler_config) if mesh is None else (self._num_slots,)

    self.compiling, self._compiled = False, set()

    self._state = empty_state(model_config, sampler_config, self._layout)
    # Start on the parameters' device, where the programs return the state; otherwise each would compile twice.
    if mesh is None:
      self._state = jax.device_put(self._state, next(iter(jax.tree.leaves(params)[0].devices())))

  @property
  def decode_batch(self) -> int:
    """Slots per dispatch."""
    return self._decode_batches[-1]

  def extend(self, extensions: Sequence[Extension], weights: Weights | None = None) -> list[Prefill]:
    """Writes the tokens and starts the turns: a prompt, the next turn of a trajectory, a prefill after a publish.

    A slot that was in use is taken over. Returns at once, with one `Prefill` for each call if experts are recorded.
    `weights` take the place of the published ones.

    Raises:
      ConfigError: tokens and budget do not fit into the cache; nothing is written then.
    """
    for extension in extensions:
      extension.check(self.config.context_length)
    calls = plan_calls(extensions, self._lengths, self._prefixes, self._prefill_batches)
    prefills = [Prefill(call, self._extend(call, weights or self._weights)) for call in calls]
    return prefills if self.routed_shape else []

  def decode(self, num_steps: int, lengths: Mapping[int, int], weights: Weights | None = None) -> Dispatch:
    """Starts up to `num_steps` ≤ decode_steps steps and returns at once; a slot stops by itself when its turn ends.

    `lengths` names the slots to decode, at most `decode_batch`, and for each how many tokens it has written, at most.
    `weights` take the place of the published ones.
    """
    rows = buckets.smallest_bucket(self._decode_batches, len(lengths))
    slots = np.full((rows,), self._num_slots, np.int32)
    members = np.fromiter(lengths, np.int32, len(lengths))
    slots[members if rows == self._num_slots else slice(len(members))] = members
    window = buckets.smallest_bucket(self._windows, max(lengths.values()))
    return self._decode(slots, num_steps, window, weights or self._weights)

  @property
  def _weights(self) -> Weights:
    """The published ones, with the run's random numbers."""
    return Weights(self.params, self.version, self._key)

  def publish(self, params: Params, version: int) -> None:
    """Uses these parameters from the next dispatch on; the cache stays as it is.

    Raises:
      ConfigError: they are those of another model, see `check_params`.
    """
    self.check_params(params)
    self.params, self.version = params, version

  def check_params(self, params: Params) -> None:
    """Refuses parameters of another model, before they fail half-way or compile everything anew.

    Raises:
      ConfigError: naming the first parameter that differs.
    """
    ours, theirs = _leaf_types(self.params), _leaf_types(params)
    for name in sorted(ours.keys() | theirs.keys()):
      if ours.get(name) != theirs.get(name):
        raise ConfigError(
          f"published parameter {name}",
          f"it is {theirs.get(name, 'missing')}; the sampler has {ours.get(name, 'no such parameter')}.",
          "publish the model that the engine was built with, in the same dtypes.",
        )

  def warm_up(self, *, prefixes: bool = True) -> None:
    """Compiles every program that a run can need; no slot changes.

    `prefixes=False` leaves out what only later turns, and prompts beyond the largest prefill bucket, need.
    """
    for rows in self._decode_batches:
      for window in self._windows:
        self._decode(np.full((rows,), self._num_slots, np.int32), 0, window, self._weights)
    for window in (0, *(self._prefixes if prefixes else ())):
      for length in self._lengths:
        for rows in self._prefill_batches:
          self._extend(PrefillCall([], rows, length, window), self._weights)

  def _decode(self, slots: np.ndarray, num_steps: int, window: int, weights: Weights) -> Dispatch:
    with self._compilation("decode", len(slots), window):
      self._state, outputs = steps.decode(
        weights.params,
        self._state,
        weights.key,
        slots,
        np.int32(num_steps),
        config=self._model_config,
        rule=self._rule,
        window=window,
        max_steps=self.config.decode_steps,
        keep_experts=self.routed_shape is not None,
        layout=self._layout,
      )
    return Dispatch(slots=slots, version=weights.version, outputs=outputs)

  def _extend(self, call: PrefillCall, weights: Weights) -> jax.Array | None:
    with self._compilation("extend", call.rows, call.length, call.window):
      self._state, routed_experts = steps.extend(
        weights.params,
        self._state,
        *call.arrays(self._num_slots),
        config=self._model_config,
        window=call.window,
        keep_experts=self.routed_shape is not None,
        layout=self._layout,
      )
    return routed_experts

  @contextlib.contextmanager
  def _compilation(self, *shape: str | int) -> Iterator[None]:
    """Marks the first call of a program, and announces it."""
    self.compiling = shape not in self._compiled
    name, *sizes = shape
    what = f"Compiling the sampler's {name} of {' x '.join(map(str, sizes))}"
    with announced(what) if self.compiling else contextlib.nullcontext():
      yield
    self._compiled.add(shape)
    self.compiling = False


def _leaf_types(params: Params) -> dict[str, str]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {path_name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
