"""Trains a policy and its critic with asynchronous SAO. Run again, it goes on where it stopped.

python -m launch.train --config=configs/calculator.py --workdir=runs/calculator
"""

from __future__ import annotations

from launch import _flags
from sao_jax.config import RunConfig
from sao_jax.training import loop


def main(config: RunConfig, workdir: str) -> int:
  """Runs the phase; returns the exit status."""
  return _flags.EXIT_RESUMABLE if loop.train(config, workdir, validated=True).interrupted else 0


if __name__ == "__main__":
  _flags.run(main, training=True)
