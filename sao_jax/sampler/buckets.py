"""The static sizes that programs are compiled for: a few buckets, so that a run stops compiling after its start."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from sao_jax.config import SamplerConfig
from sao_jax.errors import ConfigError
from sao_jax.parallel.rules import AxisRules

_SMALLEST_WINDOW = 64


def smallest_bucket(buckets: Sequence[int], size: int) -> int:
  """Returns the smallest of the ascending `buckets` that holds `size`; the largest one if none does."""
  return buckets[min(bisect.bisect_left(buckets, size), len(buckets) - 1)]


def window_buckets(config: SamplerConfig) -> tuple[int, ...]:
  """Returns the attended cache lengths, ascending; the last one is the whole cache."""
  sizes = set(config.window_buckets) or {2**i for i in range(31) if 2**i >= _SMALLEST_WINDOW}
  return (*sorted(size for size in sizes if size < config.context_length), config.context_length)


def prefill_buckets(config: SamplerConfig) -> tuple[int, ...]:
  """Returns the padded lengths of a prefill, ascending; a longer prompt is written in several pieces."""
  return tuple(sorted({min(size, config.context_length) for size in config.prefill_buckets}))


def prefix_windows(config: SamplerConfig) -> tuple[int, ...]:
  """Returns the windows of a prefill behind other tokens, ascending: every second one, counted from the whole cache."""
  return window_buckets(config)[::-1][::2][::-1]


def decode_batches(config: SamplerConfig) -> tuple[int, ...]:
  """Returns the numbers of slots per decode, ascending: the largest one, and quarters of it for the end of a run."""
  return _quarters(min(config.decode_batch, config.num_slots), smallest=8)


def prefill_batches(config: SamplerConfig) -> tuple[int, ...]:
  """Returns the numbers of sequences per prefill, ascending from 1."""
  return _quarters(config.prefill_batch, smallest=1)


def _quarters(largest: int, smallest: int) -> tuple[int, ...]:
  sizes = [largest]
  while sizes[-1] > smallest:
    sizes.append(max(sizes[-1] // 4, smallest))
  return tuple(reversed(sizes))


def data_shards(mesh: Mesh, rules: AxisRules) -> int:
  """Returns the number of devices that share the slots, or the rows of a batch."""
  return math.prod(mesh.shape[axis] for axis in rules.mesh_axes("batch"))


def check_sampler_config(config: SamplerConfig, shards: int = 1) -> None:
  """Refuses sizes that cannot work, alone or with slots split over `shards` devices.

  Raises:
    ConfigError: naming the field.
  """
  for name in ("num_slots", "context_length", "decode_steps", "decode_batch", "prefill_batch"):
    if getattr(config, name) < 1:
      raise ConfigError(f"sampler.{name}", f"it is {getattr(config, name)}.", "use a positive number.")
  if config.num_slots % shards:
    raise ConfigError(
      "sampler.num_slots",
      f"{config.num_slots} slots cannot be split over {shards} devices of the mesh's data axes.",
      f"use a multiple of {shards}.",
    )
  for name in ("prefill_buckets", "window_buckets"):
    if any(size < 1 for size in getattr(config, name)):
      raise ConfigError(f"sampler.{name}", f"it is {getattr(config, name)}.", "use positive sizes.")
  if not config.prefill_buckets:
    raise ConfigError("sampler.prefill_buckets", "it is empty.", "name at least one padded length, as (16, 64).")
  if config.kv_after_publish not in ("keep", "reprefill"):
    raise ConfigError("sampler.kv_after_publish", f"it is {config.kv_after_publish!r}.", "use 'keep' or 'reprefill'.")
  if not 0 < config.top_p <= 1 or config.top_k < 0:
    raise ConfigError(
      "sampler.top_p", f"top_p={config.top_p}, top_k={config.top_k}.", "use 0 < top_p <= 1 and top_k >= 0 (0: off)."
    )
