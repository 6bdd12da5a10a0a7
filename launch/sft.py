"""Imitation cold start on demonstrations that the environment produces.

python -m launch.sft --config=configs/calculator.py --workdir=runs/calculator
"""

from __future__ import annotations

import functools

from launch import _flags
from sao_jax.training import sft

if __name__ == "__main__":
  _flags.run(functools.partial(sft.sft, validated=True), training=True)
