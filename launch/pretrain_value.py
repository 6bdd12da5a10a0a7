"""Trains the critic on rollouts of the frozen initial policy until its explained variance plateaus.

python -m launch.pretrain_value --config=configs/calculator.py --workdir=runs/calculator
"""

from __future__ import annotations

import functools

from launch import _flags
from sao_jax.training import loop

if __name__ == "__main__":
  _flags.run(functools.partial(loop.pretrain_value, validated=True), training=True)
