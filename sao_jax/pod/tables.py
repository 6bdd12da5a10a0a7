"""Figures of a compiled program as text: a table for people, and what to change where it does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from sao_jax.pod.chips import GIB

_SHOWN = 8  # rows of each list
_SAMPLER_REMEDY = "fewer sampler.num_slots or sampler.num_pages, a shorter sampler.context_length, or more devices"


def tables(figures: dict[str, Any]) -> Iterator[Table | str]:
  """Yields the tables of one program."""
  title = f"{figures.get('run', '')} {figures['program']} on {figures.get('topology', '?')}".strip()
  if "lower_seconds" not in figures:
    yield f"{title}: does not compile\n{figures['message']}"
    return
  table = Table(title=title, show_header=False)
  for name, value in _summary(figures):
    table.add_row(name, value)
  yield table
  yield _listed("largest arrays", ("GiB", "array", "operation"), _arrays(figures))
  if "collectives" in figures:
    yield _listed("communication of a chip", ("GB", "runs", "kind", "axes", "largest"), _sent(figures))
    flops = [(f"{value / 1e12:.2f}", name) for name, value in figures["largest_products"]]
    yield _listed("products", ("TFLOP", "operation"), flops)
    moved = [(f"{value / 1e9:.1f}", name) for name, value in figures["largest_traffic"]]
    yield _listed("memory traffic", ("GB", "operation"), moved)


def _summary(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (name, value) of the figures that matter first."""
  limit = figures["hbm_limit_bytes"] / GIB
  axes = ", ".join(f"{name}={size}" for name, size in figures["mesh"].items() if size > 1)
  yield "devices", f"{figures['devices']} ({axes or 'one'})"
  if figures.get("peak_bytes") is not None:
    yield "peak memory", f"{figures['peak_bytes'] / GIB:.2f} of {limit:.2f} GiB"
    parts = (figures["argument_bytes"] / GIB, figures["temporary_bytes"] / GIB)
    yield "arguments, temporaries", "{:.2f}, {:.2f} GiB".format(*parts)
  else:
    needed = figures["needed_bytes"]
    yield "does not fit", f"needs {needed / GIB:.1f} of {limit:.2f} GiB" if needed else figures["message"]
  for name, size in figures["resident_bytes"].items():
    yield f"  {name}", f"{size / GIB:.2f} GiB"

  if "roofline" in figures:
    line, flops = figures["roofline"], figures["flops"]
    yield "FLOPs", f"{flops['all'] / 1e12:.2f} T, of kernels {flops['kernels'] / 1e12:.2f} T"
    efficiency = line["attention_efficiency_assumed"]
    yield (
      "arithmetic",
      f"{line['mxu_seconds']:.4g} s; {line['mxu_seconds_expected']:.4g} s with attention at {efficiency}",
    )
    yield "memory", f"{line['hbm_seconds']:.4g} s for {figures['hbm_bytes'] / 1e9:.1f} GB"
    yield "communication", f"{line['ici_seconds']:.4g} s"
    yield "bound", f"{line['seconds']:.4g} s by {line['bound_by']}"
    if figures["tokens"]:
      yield "tokens per second", f"{figures['tokens'] / line['seconds']:.0f} on all devices, at most"
      used = (line["utilisation_at_peak"], line["utilisation_expected"])
      yield "model-FLOP utilisation", "{:.1%} at peak rates, {:.1%} expected".format(*used)
  seconds = f"{figures['lower_seconds']:.0f} + {figures.get('compile_seconds', 0):.0f} s"
  yield "lowered and compiled", f"{seconds}, {figures['rss_bytes'] / 1e9:.1f} GB"


def together(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Adds up what lies in a chip at the same time, for each run: a dict per kind of chip, in bytes.

  On the learner, the step that needs most; on a sampler, its largest program and a second copy of the parameters, which
  arrives while the first one is in use. Where both are the same devices, all of it.
  """
  sums = []
  for run in dict.fromkeys(each["run"] for each in results if each.get("peak_bytes") is not None):
    own = [each for each in results if each.get("run") == run and each.get("peak_bytes") is not None]
    learns = [each for each in own if each["program"].endswith("step")]
    samples = [each for each in own if each["program"] in ("decode", "prefill")]
    parts = [_side(f"{run}: learner", learns, {})] if learns else []
    if samples:
      copy = samples[0]["resident_bytes"]["parameters"]
      parts.append(_side(f"{run}: sampler", samples, {"parameters that arrive": copy}))
    if learns and samples and learns[0]["placement"] == "shared":
      # A step leaves the cache and the sampler's parameters where they are.
      parts = [_side(f"{run}: learner and sampler", learns, samples[0]["resident_bytes"])]
    sums += parts
  return sums


def _side(name: str, programs: Sequence[dict[str, Any]], beside: dict[str, int]) -> dict[str, Any]:
  """The program with the highest peak, and what lies beside it."""
  largest = max(programs, key=lambda each: each["peak_bytes"])
  parts = {f"peak of {largest['program']}": largest["peak_bytes"]} | beside
  total, limit = sum(parts.values()), largest["hbm_limit_bytes"]
  return {"name": name, "parts": parts, "total_bytes": total, "hbm_limit_bytes": limit, "fits": total <= limit}


def together_table(sums: Sequence[dict[str, Any]]) -> Table:
  """Shows `together`."""
  table = Table("chip", "GiB", "of", "parts", title="together in a chip")
  for row in sums:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in row["parts"].items())
    table.add_row(row["name"], f"{row['total_bytes'] / GIB:.2f}", f"{row['hbm_limit_bytes'] / GIB:.2f}", parts)
  return table


def _arrays(figures: dict[str, Any]) -> list[tuple[str, ...]]:
  return [(f"{row['bytes'] / GIB:.3f}", row["array"], _end(row["operation"])) for row in figures["largest_arrays"]]


def _sent(figures: dict[str, Any]) -> list[tuple[str, ...]]:
  return [
    (f"{row['wire_bytes'] / 1e9:.2f}", str(row["runs"]), row["kind"], row["axes"], _end(row["largest"]))
    for row in figures["collectives"]
  ]


def _end(text: str, length: int = 70) -> str:
  return text if len(text) <= length else f"…{text[-length:]}"


def _listed(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
  table = Table(*columns, title=title)
  for row in rows[:_SHOWN]:
    table.add_row(*(Text(_end(cell)) for cell in row))  # a shape in brackets is no markup
  return table


def advice(figures: dict[str, Any]) -> list[str]:
  """Says what to change for a program that does not fit: by its largest arrays, and by what it holds."""
  if figures["fits"] or "lower_seconds" not in figures:
    return []
  lines, limit = [], figures["hbm_limit_bytes"]
  resident = sum(figures["resident_bytes"].values())
  if resident > limit / 2 or not _learns(figures):
    change = "a larger mesh.fsdp or more devices" if _learns(figures) else _SAMPLER_REMEDY
    lines.append(f"its inputs alone take {resident / GIB:.1f} GiB of each chip: {change}.")
  lines += [
    f"{row['bytes'] / GIB:.1f} GiB are {row['array']} ({_end(row['operation'])}): {_remedy(row)}."
    for row in figures["largest_arrays"][: 3 if _learns(figures) else 0]
  ]
  return ["What to change:", *(f"* {line}" for line in lines)]


def _learns(figures: dict[str, Any]) -> bool:
  return figures["program"] not in ("decode", "prefill")


def _remedy(row: dict[str, Any]) -> str:
  """A change that makes such an array smaller."""
  sizes = sorted(int(size) for size in re.findall(r"\d+", re.sub(r"^\w+\[", "[", row["array"]).partition("]")[0]))
  if len(sizes) > 1 and sizes[-2] >= 8192:
    return "two axes grow with the row: shorter rollout.row_lengths, or a kernel that builds no such array"
  return "more algorithm.micro_batches, a larger mesh.context, model.remat=full, or a smaller logprob_chunk"
