"""The static sizes that programs are compiled for: a few buckets, so that a run stops compiling after its start."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from sao_jax.config import SamplerConfig
from sao_jax.errors import ConfigError

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


def check_slots(config: SamplerConfig, shards: int) -> None:
  """Raises ConfigError when the slots do not split evenly over `shards` devices."""
  if config.num_slots % shards:
    raise ConfigError(
      "sampler.num_slots",
      f"{config.num_slots} slots cannot be split over {shards} devices of the mesh's data axes.",
      f"use a multiple of {shards}.",
    )
