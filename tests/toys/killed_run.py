"""A deterministic toy run in a process of its own, to be killed: python killed_run.py WORKDIR STEPS SEED KIND."""

from __future__ import annotations

import dataclasses
import sys

import jax

from sao_jax.environments.wrappers import Chaos, SimulatedLatency
from sao_jax.training import loop
from toys import training_toy


def get_config(steps: int, latency_seed: int, kind: str = "plain"):
  """Every process waits differently for its environments; what is sampled must not depend on it.

  `kind="faulty"`: a synchronous run with evaluations, fewer episodes at once than a batch, and broken environments.
  """
  config = training_toy.replace(
    training_toy.get_config(),
    rollout={"deterministic": True},
    training={"steps": steps, "checkpoint_every": 2, "keep_checkpoints": 1, "audit": False},
  )
  environment = config.environment
  if kind == "faulty":
    environment = Chaos(environment, raises=0.1, garbage=0.1)
    config = training_toy.replace(
      config,
      # Fewer and smaller programs, which each process has to trace again; `plain` shows batches, and experts.
      model={"num_experts": 0, "d_ff": 16},
      sampler={"prefill_batch": 1},
      rollout={"admission_staleness": 0, "max_in_flight": 3, "environment_retries": 1},
      evaluation={"every": 8},
    )
  latency = SimulatedLatency(environment, mean=0.005, sigma=1.0, seed=latency_seed)
  return dataclasses.replace(config, environment=latency)


if __name__ == "__main__":
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # it is started again and again
  workdir, steps, latency_seed, kind = sys.argv[1:]
  loop.train(get_config(int(steps), int(latency_seed), kind), workdir)
