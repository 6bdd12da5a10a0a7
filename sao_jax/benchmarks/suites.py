"""All measurements by name, and how their results are shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

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


def machine() -> dict[str, Any]:
  """Where the figures come from; all of them but those of the loop use the first device alone."""
  device = jax.local_devices()[0]
  return {
    "platform": device.platform,
    "device": device.device_kind,
    "local_devices": jax.local_device_count(),
    "cpus": os.cpu_count(),
    "jax": jax.__version__,
  }


def flatten(results: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"dense": {"rate": 1}} -> {"dense/rate": 1}, for a table."""
  flat: dict[str, Any] = {}
  for key, value in results.items():
    flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
  return flat
