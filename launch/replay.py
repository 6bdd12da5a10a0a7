"""Replays a recorded run synchronously, and compares the parameters with the run's, bit for bit.

python -m launch.replay --workdir=runs/calculator

The run must have been trained with --config.rollout.record=True or --config.rollout.deterministic=True. Exit status 1
when anything differs, as it may on another machine or number of devices.
"""

from __future__ import annotations

import sys

from absl import logging

from launch import _flags
from sao_jax.config import RunConfig
from sao_jax.training.replay import replay


def main(config: RunConfig, workdir: str) -> None:
  """Replays the run and logs the comparison; exits with status 1 when anything differs."""
  result = replay(config, workdir, validated=True)
  if result.identical:
    logging.info("Replayed %d steps: all %d arrays are identical, bit for bit.", result.steps, result.leaves)
    return
  logging.error(
    "Replayed %d steps: %d of %d arrays differ, by up to %.3g; the first is %s.",
    result.steps,
    len(result.differing),
    result.leaves,
    result.largest_difference,
    result.differing[0],
  )
  sys.exit(1)


if __name__ == "__main__":
  _flags.run(main, training=True, writes=False)
