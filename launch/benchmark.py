"""Measures sampler, train step and loop on this machine; prints ratios taken in one run as a JSON object.

python -m launch.benchmark [--suite=sampler,batching] [--quick] [--peers=PYTHON]

On a CPU each core becomes a device of its own (--cpu_devices), over which rows and sampler slots are spread.
Standard output holds the JSON alone; tables go to standard error. --quick uses tiny shapes: its figures mean nothing,
it only shows that everything runs. --peers names a Python with google-tunix and PyTorch, which then run in turn with
ours: see `sao_jax.benchmarks.peers`.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import jax
import rich.console
from absl import flags, logging

from launch import _flags
from sao_jax.benchmarks.peers import Peers
from sao_jax.benchmarks.scale import FULL, QUICK
from sao_jax.benchmarks.suites import SUITES, machine, run, tables
from sao_jax.report.metrics import to_json

WIDTH = 180  # of tables in files, in characters

_SUITE = flags.DEFINE_list("suite", list(SUITES), "What to measure.")
_QUICK = flags.DEFINE_bool("quick", False, "Tiny shapes.")

_PEERS = flags.DEFINE_string("peers", None, "A Python with the frameworks to compare with.")

# The CPUs that this process may use, where the system tells.
_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
_CPU_DEVICES = flags.DEFINE_integer(
  "cpu_devices", _CPUS, "Devices that a CPU is divided into; 0: as XLA_FLAGS say.", lower_bound=0
)

flags.register_validator(
  "suite",
  lambda names: bool(names) and set(names) <= SUITES.keys(),
  message=f"Choose some of {', '.join(SUITES)}.",
)


def main() -> None:
  """Runs the suites and prints their figures."""
  if _CPU_DEVICES.value:
    jax.config.update("jax_num_cpu_devices", _CPU_DEVICES.value)
  logging.set_verbosity(logging.WARNING)

  # Tables go to standard error as suites end; the JSON follows when all have.
  console = rich.console.Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
  results: dict[str, Any] = {"machine": machine()}
  peers = Peers(_PEERS.value, pathlib.Path(__file__).parent / "peers") if _PEERS.value else None
  if peers:
    results["peers"] = peers.check()
  for name in _SUITE.value:
    console.print(f"measuring {name} ...")
    results[name] = run(name, QUICK if _QUICK.value else FULL, peers)
    for table in tables(name, results[name]):
      console.print(table)
  print(json.dumps(to_json(results), indent=2, allow_nan=False))


if __name__ == "__main__":
  _flags.run_tool(main, example=f"--suite={next(iter(SUITES))}")
