"""Communication of a program: its collectives by kind and mesh axes, and the bytes that each chip sends for them."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sao_jax.pod.hlo import Array, Instruction, Program

KINDS = (
  *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
  *("collective-permute", "collective-broadcast"),
)
GATHER_AS_REDUCE = "all-gather as all-reduce"  # over a whole torus: each chip adds its part to zeros

_ITERATION = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?\s*\{([^}]*)\}")
_LISTS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([^=]*?)\}\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a program.

  Attributes:
    kind: one of `KINDS`, or `GATHER_AS_REDUCE`.
    axes: the mesh axes that it communicates over, joined by "*"; "?" where its groups are none of the mesh.
    group: the number of chips in a group.
    array: the largest array that enters or leaves it, on one chip: the gathered one, the one before it is scattered.
    wire_bytes: what each chip sends in one run, with an algorithm that sends the least.
    runs: how often it runs.
    op_name: the operation that asked for it.
  """

  kind: str
  axes: str
  group: int
  array: Array
  wire_bytes: float
  runs: float
  op_name: str


def collectives(program: Program, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
  """Lists the collectives of a program; `mesh` has the sizes of the axes, in the order of the mesh.

  Collectives that the compiler overlaps with computation stand in several fusions, of which only the first sends.
  """
  # The fusions of one overlapped collective share its channel; the first of them ends in AsyncCollectiveStart.
  started = {
    name
    for name, body in program.computations.items()
    if any(each.is_root and each.target == "AsyncCollectiveStart" for each in body)
  }
  found = [each for each in program.instructions(fused=True) if _kind(each[0])]
  overlapped = {_channel(each) for each, _ in found if each.computation in started} - {None}

  result = []
  for instruction, runs in found:
    if instruction.computation in started or _channel(instruction) not in overlapped:
      result.append(_collective(program, instruction, runs, mesh))
  return tuple(each for each in result if each.group > 1)


def bytes_by_kind_and_axes(found: Sequence[Collective]) -> dict[tuple[str, str], float]:
  """Sums the bytes that a chip sends, per (kind, axes), the largest first."""
  total: dict[tuple[str, str], float] = collections.Counter()
  for each in found:
    total[each.kind, each.axes] += each.runs * each.wire_bytes
  return dict(sorted(total.items(), key=lambda item: -item[1]))


def axes_of(group: Sequence[int], mesh: Mapping[str, int]) -> str:
  """Names the mesh axes along which the members of a group differ, joined by "*"; "?" where there are none.

  >>> axes_of([0, 2], {"data": 2, "fsdp": 2, "tensor": 2}), axes_of([0, 1, 4, 5], {"data": 2, "fsdp": 2, "tensor": 2})
  ('fsdp', 'data*tensor')
  """
  if not group or max(group) >= math.prod(mesh.values()):
    return "?"
  places = np.unravel_index(np.asarray(group), tuple(mesh.values()))
  return "*".join(name for name, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1) or "?"


def first_group(attributes: str) -> list[int]:
  """Reads the members of the first group of a collective, as numbers of devices in the order of the mesh.

  >>> first_group("replica_groups=[4,2]<=[2,4]T(1,0)"), first_group("replica_groups={{0,2},{1,3}}")
  ([0, 4], [0, 2])
  >>> first_group("replica_groups=mesh['a'=2,'b'=1,'c'=4] {'a'}")
  [0, 4]
  """
  if match := _ITERATION.search(attributes):
    groups, devices = (_numbers(match[i]) for i in (1, 2))
    return _transposed(devices, match[3]).reshape(groups).reshape(-1, groups[-1])[0].tolist()
  if match := _MESH.search(attributes):
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
    chosen = re.findall(r"'([^']+)'", match[4])
    devices = _transposed(_numbers(match[2]), match[3]) if match[2] else np.arange(math.prod(sizes.values()))
    along = tuple(slice(None) if name in chosen else 0 for name in sizes)
    return devices.reshape(tuple(sizes.values()))[along].reshape(-1).tolist()
  match = _LISTS.search(attributes)
  return _numbers(match[1]) if match else []


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(",") if number]


def _transposed(sizes: Sequence[int], order: str | None) -> np.ndarray:
  devices = np.arange(math.prod(sizes)).reshape(sizes)
  return devices.transpose(_numbers(order)) if order else devices


def _kind(instruction: Instruction) -> str | None:
  kind = instruction.opcode.removesuffix("-start")
  return kind if kind in KINDS else None


def _channel(instruction: Instruction) -> str | None:
  match = _CHANNEL.search(instruction.attributes)
  return match[1] if match else None


def _collective(program: Program, instruction: Instruction, runs: float, mesh: Mapping[str, int]) -> Collective:
  """Reads one instruction."""
  kind, results = _kind(instruction), instruction.results
  size = sum(array.bytes for array in results)
  largest = max(results, key=lambda array: array.bytes)
  if kind == "ragged-all-to-all":
    size = min([size, *(each.bytes for each in program.operands(instruction)[:1] if each)])  # there may be more room

  # A permutation has pairs in place of groups: those that really go somewhere else.
  if kind == "collective-permute":
    pairs = [pair for pair in _pairs(instruction.attributes) if pair[0] != pair[1]]
    axes = "*".join(sorted({axes_of(pair, mesh) for pair in pairs})) if pairs else "?"
    axes = "*".join(name for name in mesh if name in axes.split("*")) or axes
    return Collective(kind, axes, 2 if pairs else 1, largest, size, runs, instruction.op_name)

  members = first_group(instruction.attributes)
  group = len(members)
  others = (group - 1) / group if group else 0.0
  kind, wire = _really(program, instruction, kind), size * others
  if kind == "reduce-scatter" and instruction.opcode.startswith("reduce-scatter"):
    wire *= group  # the result is one part
    largest = max((each.arrays[0] for each in program.operands(instruction) if each), key=lambda array: array.bytes)
  elif kind in ("all-reduce", GATHER_AS_REDUCE):
    wire *= 2  # reduces and scatters, then gathers
  return Collective(kind, axes_of(members, mesh), group, largest, wire, runs, instruction.op_name)


def _pairs(attributes: str) -> Iterator[list[int]]:
  match = _PAIRS.search(attributes)
  return (_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}?", match[0])) if match else iter(())


def _really(program: Program, instruction: Instruction, kind: str) -> str:
  """The kind of a collective that does the work of another one."""
  if kind == "all-reduce" and "all-reduce-scatter" in instruction.computation:
    return "reduce-scatter"  # of its result each chip keeps one part, which the fusion around it says
  if kind == "all-reduce" and any("dynamic-update-slice" in name for name in instruction.operands):
    return GATHER_AS_REDUCE
  return kind
