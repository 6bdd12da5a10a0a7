"""Compiles one lowered program and describes it: a dict of plain numbers, per chip unless it says otherwise."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from typing import Any

import jax

from sao_jax.pod import traffic
from sao_jax.pod.chips import Chip, axis_bandwidth
from sao_jax.pod.communication import Collective, collectives
from sao_jax.pod.hlo import parse
from sao_jax.pod.lowering import Lowered
from sao_jax.pod.matrix_products import kernels, largest_products, products
from sao_jax.pod.roofline import roofline, utilisation

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = re.compile(r"(?:required for [^(]*\(|Used )([\d.]+)([KMGT]?)")
_ALLOCATION = re.compile(r"Size: ([\d.]+)([KMGT]?).*?\n(.*?)Shape: (\S+)", re.DOTALL)


def describe(lowered: Lowered, chip: Chip) -> dict[str, Any]:
  """Lowers, compiles and reads a program.

  A program that does not fit has "fits": False, with what the compiler says that it needs, and the largest arrays.
  """
  start = time.monotonic()
  # Kernels ask the mesh at hand for the kind of its devices: without it, for the host's.
  with jax.sharding.use_abstract_mesh(lowered.mesh.abstract_mesh):
    program = lowered.lower()
  lowering = time.monotonic() - start
  result: dict[str, Any] = {
    "devices": lowered.mesh.size,
    "mesh": dict(lowered.mesh.shape),
    "tokens": lowered.tokens,
    "model_flops": lowered.model_flops / lowered.mesh.size,
    "hbm_limit_bytes": chip.hbm,
    "resident_bytes": lowered.resident,
    "lower_seconds": lowering,
  }

  start = time.monotonic()
  try:
    compiled = program.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    result |= too_large(str(error), program.as_text)
  else:
    result["compile_seconds"] = time.monotonic() - start
    result |= _memory(compiled, chip) | _costs(compiled.as_text(), lowered, chip)
  # The whole process: in KiB, on Linux.
  return result | {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _memory(compiled: jax.stages.Compiled, chip: Chip) -> dict[str, Any]:
  """The compiler's own account. Its peak decides: arguments and temporaries need not live at the same time."""
  stats = compiled.memory_analysis()
  return {
    "fits": stats.peak_memory_in_bytes <= chip.hbm,
    "peak_bytes": stats.peak_memory_in_bytes,
    "argument_bytes": stats.argument_size_in_bytes,
    "temporary_bytes": stats.temp_size_in_bytes,
    "host_bytes": stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
  }


def _costs(text: str, lowered: Lowered, chip: Chip) -> dict[str, Any]:
  """Arithmetic, traffic, communication, and the roofline of them."""
  program = parse(text, unknown_trips=lowered.rounds, branch_share=lowered.branch_share)
  found, sent = products(program), collectives(program, dict(lowered.mesh.shape))
  moved = traffic.hbm_bytes(program)

  wire: dict[str, tuple[float, float]] = {}
  for each in sent:
    total, _ = wire.get(each.axes, (0.0, 0.0))
    speed = axis_bandwidth(lowered.mesh, each.axes.split("*"), chip)
    wire[each.axes] = (total + each.runs * each.wire_bytes, speed)
  bound = roofline(chip, found, moved, wire)

  flops = {"all": sum(each.flops * each.runs for each in found)}
  flops["kernels"] = sum(each.flops * each.runs for each in found if each.kernel)
  flops["attention kernels"] = sum(each.flops * each.runs for each in found if each.is_attention)
  return {
    "flops": flops,
    "hbm_bytes": moved,
    "collectives": _by_kind(sent),
    "kernels": kernels(program),
    "largest_arrays": [_array(sized) for sized in traffic.largest_arrays(program)],
    "largest_products": largest_products(found),
    "largest_traffic": traffic.hbm_bytes_by_operation(program),
    "unknown_loops": len(program.unknown_loops),
    "bandwidth": {axes: speed for axes, (_, speed) in wire.items()},
    "roofline": {
      "mxu_seconds": bound.mxu,
      "attention_seconds": bound.kernels,
      "attention_efficiency_assumed": bound.efficiency,
      "mxu_seconds_expected": bound.mxu_expected,
      "hbm_seconds": bound.hbm,
      "ici_seconds": bound.ici,
      "seconds": bound.seconds,
      "bound_by": bound.bound_by,
      "utilisation_at_peak": utilisation(
        chip, lowered.model_flops / lowered.mesh.size, max(bound.mxu, bound.hbm, bound.ici)
      ),
      "utilisation_expected": utilisation(chip, lowered.model_flops / lowered.mesh.size, bound.seconds),
    },
  }


def _array(sized: traffic.Sized) -> dict[str, Any]:
  return {
    "array": str(sized.array),
    "bytes": sized.array.bytes,
    "operation": f"{sized.opcode} {sized.op_name}".strip(),
  }


def _by_kind(sent: tuple[Collective, ...]) -> list[dict[str, Any]]:
  """The collectives of each kind over the same axes, together; those that send most come first."""
  groups: dict[tuple[str, str], list[Collective]] = {}
  for each in sent:
    groups.setdefault((each.kind, each.axes), []).append(each)
  rows = []
  for (kind, axes), members in groups.items():
    largest = max(members, key=lambda each: each.array.bytes)
    rows.append(
      {
        "kind": kind,
        "axes": axes,
        "group": members[0].group,
        "runs": round(sum(each.runs for each in members)),
        "wire_bytes": sum(each.runs * each.wire_bytes for each in members),
        "largest_bytes": largest.array.bytes,
        "largest": f"{largest.array} {largest.op_name}".strip(),
      }
    )
  return sorted(rows, key=lambda row: -row["wire_bytes"])


def too_large(message: str, traced: Callable[[], str]) -> dict[str, Any]:
  """Reads the compiler's message about a program that does not fit.

  Args:
    message: the bytes that it needs, and perhaps its largest arrays.
    traced: returns the program before it was partitioned, whose arrays are listed where the message has none.
  """
  match = _NEEDED.search(message)
  arrays = [
    {"array": shape.partition("{")[0], "bytes": int(float(size) * _UNITS[unit]), "operation": _operation(between)}
    for size, unit, between, shape in _ALLOCATION.findall(message)
  ]
  return {
    "fits": False,
    "needed_bytes": float(match[1]) * _UNITS[match[2]] if match else None,
    "message": message.strip().splitlines()[0],
    "largest_arrays": arrays or _unpartitioned(traced()),
  }


def _operation(lines: str) -> str:
  match = re.search(r'op_name="([^"]*)"', lines)
  return match[1] if match else ""


def _unpartitioned(text: str) -> list[dict[str, Any]]:
  """The largest arrays of a program as it was traced: over all devices, before anything is fused."""
  sizes = {
    "i1": 1,
    "i8": 1,
    "i16": 2,
    "bf16": 2,
    "f16": 2,
    "i32": 4,
    "ui32": 4,
    "f32": 4,
    "i64": 8,
    "ui64": 8,
    "f64": 8,
  }
  found: dict[str, dict[str, Any]] = {}
  for line in text.splitlines():
    operation = re.search(r"= \"?([\w.]+)", line)
    for dimensions, dtype in re.findall(r"tensor<((?:\d+x)+)(\w+)>", line) if operation else ():
      shape = [int(size) for size in dimensions.split("x") if size]
      size = sizes.get(dtype, 4)
      for length in shape:
        size *= length
      name = f"{dtype}[{','.join(map(str, shape))}] on all devices together"
      found.setdefault(name, {"array": name, "bytes": size, "operation": operation[1]})
  return sorted(found.values(), key=lambda row: -row["bytes"])[:12]
