"""Prints a configuration with the overrides of the command line, and says whether a run with it could start.

python -m launch.config --config=configs/calculator.py [--config.algorithm.epsilon_low=0.2]

A star marks what an override, or the folder in model.checkpoint, has changed.
"""

from __future__ import annotations

import sys

from launch import _flags
from sao_jax.configuration.listing import listing
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError


def main() -> None:
  """Writes every field to standard output; what cannot work goes to standard error, with exit status 2."""
  try:
    given = _flags.read(sys.argv)
    _flags.set_up_logging()
    sys.stdout.write(listing(given.config, given.unchanged))
    validate(given.config, training=True)
  except ConfigError as error:
    _flags.refuse(error)


if __name__ == "__main__":
  main()
