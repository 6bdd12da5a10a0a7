"""All measurements by name, the machine they were taken on, and tables of their figures."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import rich.box
import rich.table

from sao_jax.benchmarks.generation import batching, sampler
from sao_jax.benchmarks.learning import experts, train_step
from sao_jax.benchmarks.loop_comparison import loop
from sao_jax.benchmarks.peers import Peers
from sao_jax.benchmarks.recompilation import recompilation
from sao_jax.benchmarks.scale import Scale

SUITES: dict[str, Callable[..., dict[str, Any]]] = {
  "sampler": sampler,
  "batching": batching,
  "train_step": train_step,
  "experts": experts,
  "recompilation": recompilation,
  "loop": loop,
}


WITH_PEERS = ("batching", "train_step")  # those that other frameworks can run, too


def run(name: str, scale: Scale, peers: Peers | None = None) -> dict[str, Any]:
  """Runs a suite; `peers`, other frameworks, run in turn with ours."""
  return SUITES[name](scale, peers) if name in WITH_PEERS else SUITES[name](scale)


def machine() -> dict[str, Any]:
  """Describes the machine on which the figures are taken."""
  device = jax.local_devices()[0]
  return {
    "platform": device.platform,
    "device": device.device_kind,
    "local_devices": jax.local_device_count(),
    "cpus": os.cpu_count(),
    "jax": jax.__version__,
  }


def flatten(results: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested results: {"dense": {"rate": 1}} -> {"dense/rate": 1}."""
  flat: dict[str, Any] = {}
  for key, value in results.items():
    flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
  return flat


def tables(name: str, results: dict[str, Any]) -> list[rich.table.Table]:
  """Makes the tables of a suite: one for each list of records, then one of all single figures."""
  records = {
    key: value for key, value in results.items() if isinstance(value, list) and value and isinstance(value[0], dict)
  }
  figures = flatten({key: value for key, value in results.items() if key not in records})
  summary = rich.table.Table(name, "")
  for key, value in figures.items():
    summary.add_row(key, _cell(value))
  return [*(_of_records(f"{name}/{key}", rows) for key, rows in records.items()), summary]


def _of_records(title: str, rows: list[dict[str, Any]]) -> rich.table.Table:
  """Makes a table with a row per record; the parts of a figure ("real", "model") share a cell, named by the title."""
  parts = next(("/".join(value) for value in rows[0].values() if isinstance(value, dict)), "")
  table = rich.table.Table(title=f"{title} {parts}", box=rich.box.SIMPLE)
  for key in rows[0]:
    table.add_column(key.replace("_", "\n"), justify="right", no_wrap=True)
  for row in rows:
    table.add_row(*(_cell(value, digits=3) for value in row.values()))
  return table


def _cell(value: Any, digits: int = 4) -> str:
  if isinstance(value, dict):
    return "/".join(_cell(part, digits) for part in value.values())
  return f"{value:.{digits}g}" if isinstance(value, float) else str(value)
