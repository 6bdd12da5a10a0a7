"""The engine: parameters, device state and the jitted programs of a layout of the cache behind a small host interface.

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
from sao_jax.sampler import buckets
from sao_jax.sampler.cache_layout import make_programs
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.page_call import PagedCall
from sao_jax.sampler.prefill import Extension, Piece, PrefillCall
from sao_jax.sampler.sample_loop import DecodeOutputs
from sao_jax.sampler.slot_programs import DecodeCall


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """One decode call, perhaps still running on the device.

  Attributes:
    slots: the slot of each of the R rows; num_slots marks an unused row.
    version: the version of the parameters that it samples with.
    outputs: device arrays.
    prefill: the experts of the prompts' tokens that it read as well, where they are recorded.
  """

  slots: Int[np.ndarray, " R"]
  version: int
  outputs: DecodeOutputs
  prefill: Prefill | None = None

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
  """The prompts that one call of an engine that records experts has read, perhaps still running on the device."""

  call: PrefillCall | PagedCall
  routed_experts: jax.Array  # int16 [P, T, L, k], or of all tokens of a step [D, N, L, k]

  def fetch(self) -> Iterator[tuple[int, int, Int[np.ndarray, "n L k"]]]:
    """Waits, and yields slot, index in the context of the first token, and the experts of the tokens written."""
    experts = jax.device_get(self.routed_experts)
    for piece, row, tokens in self.call.written():
      yield piece.extension.slot, piece.start, experts[row, tokens]


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
      ConfigError: a size is out of its bounds, the slots do not split over the mesh, or its pages hold no context.
    """
    check_bounds(sampler_config, "sampler.")
    layout = Layout(mesh, SAMPLER_RULES)
    buckets.check_slots(sampler_config, layout.shards("slots"))

    self.params, self.version, self.vocab_size = params, version, model_config.vocab_size
    self.config = sampler_config
    self.routed_shape = model_config.routed_shape if keep_experts else None
    self._key = jax.random.key(seed)

    self._programs = make_programs(model_config, sampler_config, layout, keep_experts)
    self.compiling, self._compiled = False, set()

    self._state = self._programs.empty_state()
    # Start on the parameters' device, where the programs return the state; otherwise each would compile twice.
    if mesh is None:
      self._state = jax.device_put(self._state, next(iter(jax.tree.leaves(params)[0].devices())))

  @property
  def decode_batch(self) -> int:
    """Slots per dispatch."""
    return self._programs.decode_batch

  @property
  def reads_prompts(self) -> bool:
    """True if prompts are read in pieces by `decode`, False if `extend` reads them whole."""
    return self._programs.reads_prompts

  def extend(self, extensions: Sequence[Extension], weights: Weights | None = None) -> list[Prefill]:
    """Writes the tokens and starts the turns: a prompt, the next turn of a trajectory, a prefill after a publish.

    A slot that was in use is taken over. Returns at once, with one `Prefill` for each call if experts are recorded.
    `weights` take the place of the published ones. Where `reads_prompts`, `decode` does all this.

    Raises:
      ConfigError: tokens and budget do not fit into the cache; nothing is written then.
    """
    for extension in extensions:
      extension.check(self.config.context_length)
    calls = self._programs.plan_extend(extensions)
    prefills = [Prefill(call, self._extend(call, weights or self._weights)) for call in calls]
    return prefills if self.routed_shape else []

  def take_pieces(self, waiting: Sequence[Piece]) -> list[Piece]:
    """Chooses what the next `decode` reads of prompts, given the rest of each; nothing unless `reads_prompts`."""
    return self._programs.take_pieces(waiting)

  def decode(
    self, num_steps: int, lengths: Mapping[int, int], weights: Weights | None = None, pieces: Sequence[Piece] = ()
  ) -> Dispatch:
    """Starts up to `num_steps` ≤ decode_steps steps and returns at once; a slot stops by itself when its turn ends.

    Args:
      num_steps: at least 1.
      lengths: the slots to decode, at most `decode_batch`, and how many tokens each has written, at most. A slot whose
        prompt ends in this call is one of them.
      weights: take the place of the published ones.
      pieces: of `take_pieces`; their tokens are written in the first step, as by `extend`.

    Raises:
      ConfigError: tokens and budget do not fit into the cache; nothing is written then.
    """
    for piece in pieces:
      piece.extension.check(self.config.context_length)
    call = self._programs.plan_decode(lengths, num_steps, pieces)
    return self._decode(call, num_steps, weights or self._weights)

  def reserve(self, slot: int, length: int) -> bool:
    """Makes sure that the slot has room for `length` tokens; False if other slots hold what it lacks.

    `extend` and `decode` do it themselves; who asks first can make room by `release`.
    """
    return self._programs.reserve(slot, length)

  def release(self, slot: int) -> None:
    """Gives up what the slot holds."""
    self._programs.release(slot)

  def share_room(self, slot: int, other: int) -> bool:
    """True if what one of the slots gives up is room for the other."""
    return self._programs.share_room(slot, other)

  def num_free_pages(self, slot: int) -> int:
    """Free pages of those that the slot may take; 0 where the cache has no pages."""
    return self._programs.num_free_pages(slot)

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
    for call in self._programs.idle_calls(prefixes):
      if isinstance(call, PrefillCall):
        self._extend(call, self._weights)
      else:
        self._decode(call, 0, self._weights)

  def _decode(self, call: DecodeCall | PagedCall, num_steps: int, weights: Weights) -> Dispatch:
    with self._compilation("decode", *call.shape):
      self._state, outputs, experts = self._programs.decode(weights, self._state, call, num_steps)
    prefill = None if experts is None else Prefill(call, experts)
    return Dispatch(slots=call.slots, version=weights.version, outputs=outputs, prefill=prefill)

  def _extend(self, call: PrefillCall, weights: Weights) -> jax.Array | None:
    with self._compilation("extend", *call.shape):
      self._state, routed_experts = self._programs.extend(weights, self._state, call)
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
