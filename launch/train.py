"""Trains a policy and its critic with asynchronous SAO. Run again, it goes on where it stopped.

python -m launch.train --config=configs/calculator.py --workdir=runs/calculator
"""

from __future__ import annotations

import functools

from launch import _flags
from sao_jax.training import loop

if __name__ == "__main__":
  _flags.run(functools.partial(loop.train, validated=True), training=True)
