"""Compilations, each in a process of its own: a compiler for TPUs takes GBs, and gives none of them back."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from sao_jax.config import RunConfig
from sao_jax.errors import ConfigError
from sao_jax.pod.chips import ENVIRONMENT, chip_of, topology_of

PROGRAMS = ("step", "critic_step", "decode", "prefill", "publish")
_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# Files of the published configurations, from the repository's folder, and further arguments.
PUBLISHED_RUNS = (
  ("configs/qwen3_4b.py", "--topology=v6e:4x4"),
  ("configs/qwen3_30b_a3b.py", "--topology=v5p:4x4x4"),
  ("configs/qwen3_30b_a3b.py", "--topology=v6e:16x16", "--config.mesh.context=16"),
  ("configs/glm_5_2.py", "--topology=v5p:8x8x8"),
)
_LAST_LINES = 15  # of a compilation that failed
_OF_ALL = ("programs", "json", "jobs")  # flags of the command that are not for each of its compilations


@dataclasses.dataclass(frozen=True)
class Request:
  """One compilation.

  Attributes:
    arguments: of `launch.compile_pod`: --config with its overrides, --topology.
    program: one of `PROGRAMS`.
  """

  arguments: tuple[str, ...]
  program: str


def check_programs(names: Sequence[str]) -> None:
  """Raises ConfigError for a program that there is not, or for none."""
  wrong = [name for name in names if name not in PROGRAMS]
  if wrong or not names:
    raise ConfigError("--programs", f"there is no program {wrong}.", f"Choose some of {', '.join(PROGRAMS)}.")


def suite(programs: Sequence[str]) -> list[Request]:
  """Requests some programs of every published run. Raises ConfigError as `check_programs`."""
  check_programs(programs)
  return [
    Request((f"--config={_REPOSITORY / config}", *more), name) for config, *more in PUBLISHED_RUNS for name in programs
  ]


def compile_all(requests: Sequence[Request], jobs: int = 1) -> Iterator[dict[str, Any]]:
  """Compiles the requests, `jobs` of them at a time, and yields their figures in order.

  A compilation that fails has "fits": False and the last lines of its output as "message".
  """
  with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
    yield from threads.map(_compile_apart, requests)


def compile_here(config: RunConfig, program: str, topology: str, sampler_topology: str | None) -> dict[str, Any]:
  """Compiles one program in this process, which must have been started with `ENVIRONMENT`.

  Raises:
    ConfigError: the topology or the configuration cannot be.
  """
  from sao_jax.pod.lowering import prepare  # jax, of which the process that only waits needs nothing
  from sao_jax.pod.measure import describe

  sampler_topology = sampler_topology or topology_of_sampler(config, topology)
  on_sampler = program in ("decode", "prefill")
  names = {"run": config.name, "program": program, "topology": sampler_topology if on_sampler else topology}
  names["placement"] = config.rollout.placement
  return names | describe(prepare(program, config, topology, sampler_topology), chip_of(topology))


def without_hosts(config: RunConfig) -> RunConfig:
  """The configuration without who samples where, which is a matter of the hosts that a run has: here there are none."""
  together = dataclasses.replace(config.rollout, placement="shared", sampler_hosts=0, hosts_per_sampler=1)
  return dataclasses.replace(config, rollout=together)


def topology_of_sampler(config: RunConfig, topology: str) -> str:
  """Names the devices of one sampler: the learner's if they are shared, otherwise a box of as many as it takes."""
  mesh = config.sampler.mesh
  if mesh is None:
    return topology
  sizes = (mesh.data, mesh.fsdp, mesh.expert, mesh.tensor, mesh.context)
  return topology if -1 in sizes else topology_of(chip_of(topology), math.prod(sizes))


def arguments_of_one(arguments: Sequence[str]) -> list[str]:
  """Returns the arguments without those that are about all programs, whose values may stand behind them.

  >>> arguments_of_one(["--config=a.py", "--json", "out.json", "--programs=step", "--topology", "v5p:2x2x1"])
  ['--config=a.py', '--topology', 'v5p:2x2x1']
  """
  kept, skip = [], False
  for argument in arguments:
    name, given, _ = argument.partition("=")
    if not skip and name.lstrip("-") not in _OF_ALL:
      kept.append(argument)
    skip = not skip and not given and name.lstrip("-") in _OF_ALL
  return kept


def _compile_apart(request: Request) -> dict[str, Any]:
  """Runs `launch.compile_pod` for one program."""
  with tempfile.TemporaryDirectory() as folder:
    result = pathlib.Path(folder) / "result.json"
    own = (f"--programs={request.program}", f"--result={result}")
    kept = arguments_of_one(request.arguments)
    command = [sys.executable, "-m", "launch.compile_pod", *kept, *own]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if result.exists():
      return json.loads(result.read_text(encoding="utf-8"))
  lines = (done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:]
  return {"program": request.program, "fits": False, "message": "\n".join(lines), "arguments": list(kept)}
