"""All measurements by name, and the machine that they are of."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from sao_jax.benchmarks.generation import batching, sampler
from sao_jax.benchmarks.learning import experts, train_step
from sao_jax.benchmarks.loop_comparison import loop
from sao_jax.benchmarks.recompilation import recompilation
from sao_jax.benchmarks.scale import Scale

SUITES: dict[str, Callable[[Scale], dict[str, Any]]] = {
  "sampler": sampler,
  "batching": batching,
  "train_step": train_step,
  "experts": experts,
  "recompilation": recompilation,
  "loop": loop,
}


def machine() -> dict[str, Any]:
  """Where the figures come from."""
  device = jax.local_devices()[0]
  return {
    "platform": device.platform,
    "device": device.device_kind,
    "local_devices": jax.local_device_count(),
    "cpus": os.cpu_count(),
    "jax": jax.__version__,
  }
