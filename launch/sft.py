"""Imitation cold start on demonstrations that the environment produces.

python -m launch.sft --config=configs/calculator.py --workdir=runs/calculator
"""

from __future__ import annotations

from launch import _flags
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import located
from sao_jax.training import phases, sft


def main(config: RunConfig, workdir: str) -> int:
  """Runs the phase; returns the exit status."""
  sft.sft(config, workdir, validated=True)
  done = phases.latest_step(located(workdir) / phases.SFT) or 0
  return _flags.EXIT_RESUMABLE if done < config.sft.steps else 0


if __name__ == "__main__":
  _flags.run(main, training=True)
