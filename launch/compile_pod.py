"""Compiles a run's programs for a TPU topology, without a TPU, and prints what they need of each chip.

python -m launch.compile_pod --config=configs/qwen3_30b_a3b.py --topology=v5p:4x4x4

Each program is compiled in a process of its own, by default one after the other. Nothing is measured: times are what
the chip's peak rates allow. Exit status 1: a program does not fit, or does not compile.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

import rich.console
from absl import flags

from launch import _flags
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError
from sao_jax.pod import compilations
from sao_jax.pod.chips import chip_of
from sao_jax.pod.compilations import PROGRAMS, Request
from sao_jax.pod.tables import advice, tables, together, together_table

WIDTH = 150  # of tables in files, in characters
_SUITE_FLAG = re.compile(r"--?suite(=(t|true|1|y|yes))?", re.IGNORECASE)  # as absl reads what is true

_TOPOLOGY = flags.DEFINE_string("topology", None, "The learner's devices, as v5p:4x4x4.")
_SAMPLER = flags.DEFINE_string("sampler_topology", None, "The devices of one sampler; default: as the config says.")
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), "Programs to compile.")
_JSON = flags.DEFINE_string("json", None, "File to write all figures to.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Programs that compile at the same time; a large one needs 8 GB.", 1)
_RESULT = flags.DEFINE_string("result", None, "Compile one program in this process, and write its figures here.")
_SUITE = flags.DEFINE_bool("suite", False, "All published configurations, each for its topology.")


def requests() -> list[Request]:
  """Reads the command line; with --result, it compiles here and there is nothing to request."""
  if any(_SUITE_FLAG.fullmatch(argument) for argument in sys.argv):
    _flags.read_flags(sys.argv, flags.FLAGS, "--suite")  # no configuration stands there: the suite names them
    if _TOPOLOGY.value or _SAMPLER.value:
      raise ConfigError("--topology", "the suite names its topologies itself.", "Leave it out, or --suite.")
    return compilations.suite(_PROGRAMS.value)

  given = _flags.read(sys.argv)
  compilations.check_programs(_PROGRAMS.value)
  if not _TOPOLOGY.value:
    raise ConfigError("--topology", "it is missing.", "Name one, as in --topology=v5p:4x4x4.")
  chip_of(_TOPOLOGY.value)
  validate(compilations.without_hosts(given.config), training=True)
  if _RESULT.value:
    figures = compilations.compile_here(given.config, _PROGRAMS.value[0], _TOPOLOGY.value, _SAMPLER.value)
    pathlib.Path(_RESULT.value).write_text(json.dumps(figures), encoding="utf-8")
    return []
  return [Request(tuple(sys.argv[1:]), name) for name in _PROGRAMS.value]


def main() -> int:
  """Compiles and prints; returns the exit status."""
  try:
    wanted = requests()
  except ConfigError as error:
    _flags.refuse(error)
  console, results = rich.console.Console(width=None if sys.stdout.isatty() else WIDTH), []
  for result in compilations.compile_all(wanted, _JOBS.value):
    results.append(result)
    for part in (*tables(result), *advice(result)):
      console.print(part, markup=False)
    if _JSON.value:
      figures = {"programs": results, "together": together(results)}
      pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
  if together(results):
    console.print(together_table(together(results)))
  return int(not all(result["fits"] for result in results))


if __name__ == "__main__":
  sys.exit(main())
