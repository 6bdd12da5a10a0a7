"""A deterministic toy run in a process of its own, to be killed: python killed_run.py WORKDIR STEPS LATENCY_SEED."""

from __future__ import annotations

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # it is started again and again

import training_toy  # noqa: E402

from sao_jax.environments.simulated_latency import SimulatedLatency  # noqa: E402
from sao_jax.training import loop  # noqa: E402


def get_config(steps: int, latency_seed: int):
  """Every process waits differently for its environments; what is sampled must not depend on it."""
  config = training_toy.replace(
    training_toy.get_config(),
    rollout={"deterministic": True},
    training={"steps": steps, "checkpoint_every": 2, "keep_checkpoints": 1, "audit": False},
  )
  latency = SimulatedLatency(config.environment, mean=0.005, sigma=1.0, seed=latency_seed)
  return training_toy.dataclasses.replace(config, environment=latency)


if __name__ == "__main__":
  workdir, steps, latency_seed = sys.argv[1:]
  loop.train(get_config(int(steps), int(latency_seed)), workdir)
