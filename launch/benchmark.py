"""Measures sampler, train step and loop on this machine; prints ratios taken in one run as a JSON object.

python -m launch.benchmark [--suite=sampler,batching] [--quick]

Standard output holds the JSON alone; a table goes to standard error. --quick uses tiny shapes: its figures mean
nothing, it only shows that everything runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import rich.console
import rich.table
from absl import app, flags, logging

from sao_jax.benchmarks import scale, suites

_SUITE = flags.DEFINE_list("suite", list(suites.SUITES), "What to measure.")
_QUICK = flags.DEFINE_bool("quick", False, "Tiny shapes.")

flags.register_validator(
  "suite",
  lambda names: bool(names) and set(names) <= suites.SUITES.keys(),
  message=f"Choose some of {', '.join(suites.SUITES)}.",
)


def main(argv: Sequence[str]) -> None:
  """Runs the suites and prints what they found."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected {argv[1]!r}; flags begin with --, as in --suite={next(iter(suites.SUITES))}")
  results = suites.run(_SUITE.value, scale.QUICK if _QUICK.value else scale.FULL)
  table = rich.table.Table("measured", "value")
  for name, value in suites.flatten(results).items():
    table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
  rich.console.Console(stderr=True).print(table)
  print(json.dumps(results, indent=2))


if __name__ == "__main__":
  logging.set_verbosity(logging.INFO)
  app.run(main)
