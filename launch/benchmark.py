"""Measures sampler, train step and loop on this machine; prints ratios taken in one run as a JSON object.

python -m launch.benchmark [--suite=sampler,batching] [--quick]

Standard output holds the JSON alone; tables go to standard error. --quick uses tiny shapes: its figures mean nothing,
it only shows that everything runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import rich.console
import rich.table
from absl import app, flags, logging

from sao_jax.benchmarks.scale import FULL, QUICK
from sao_jax.benchmarks.suites import SUITES, flatten, machine

_SUITE = flags.DEFINE_list("suite", list(SUITES), "What to measure.")
_QUICK = flags.DEFINE_bool("quick", False, "Tiny shapes.")

flags.register_validator(
  "suite",
  lambda names: bool(names) and set(names) <= SUITES.keys(),
  message=f"Choose some of {', '.join(SUITES)}.",
)


def main(argv: Sequence[str]) -> None:
  """Runs the suites and prints what they found."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected {argv[1]!r}; flags begin with --, as in --suite={next(iter(SUITES))}")
  logging.set_verbosity(logging.WARNING)
  console = rich.console.Console(stderr=True)
  results = {"machine": machine()}
  for name in _SUITE.value:
    console.print(f"measuring {name} ...")
    results[name] = SUITES[name](QUICK if _QUICK.value else FULL)
    table = rich.table.Table(name, "")
    for key, value in flatten(results[name]).items():
      table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
  print(json.dumps(results, indent=2))


if __name__ == "__main__":
  app.run(main)
