"""All measurements by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging

from sao_jax.benchmarks.generation import batching, sampler
from sao_jax.benchmarks.learning import experts, train_step
from sao_jax.benchmarks.recompilation import recompilation
from sao_jax.benchmarks.scale import Scale

SUITES: dict[str, Callable[[Scale], dict[str, Any]]] = {
  "sampler": sampler,
  "batching": batching,
  "train_step": train_step,
  "experts": experts,
  "recompilation": recompilation,
}


def run(names: Sequence[str], scale: Scale) -> dict[str, Any]:
  """The results of the named suites, JSON-able, after a description of the machine."""
  device = jax.local_devices()[0]
  results: dict[str, Any] = {
    "machine": {"platform": device.platform, "device": device.device_kind, "jax": jax.__version__}
  }
  for name in names:
    logging.info("Measuring: %s.", name)
    results[name] = SUITES[name](scale)
  return results


def flatten(results: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"sampler": {"dense": 1}} -> {"sampler/dense": 1}, for a table."""
  flat: dict[str, Any] = {}
  for key, value in results.items():
    flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
  return flat
