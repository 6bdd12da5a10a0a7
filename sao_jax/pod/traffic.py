"""Memory traffic and the largest arrays of a program.

The traffic is a sum over the instructions outside of fusions, of what they read and write in HBM; good to about 30 %.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Sequence

from sao_jax.pod.hlo import Array, Instruction, Program
from sao_jax.pod.matrix_products import KERNEL

# Instructions that move nothing by themselves.
_FREE = {
  *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "after-all"),
  *("iota", "partition-id", "replica-id", "opt-barrier", "optimization-barrier", "add-dependency"),
}
_SAME_BYTES = ("bitcast", "reshape", "copy")


@dataclasses.dataclass(frozen=True)
class Sized:
  """An array of a program, and the operation that makes it."""

  array: Array
  opcode: str
  op_name: str
  runs: float


def largest_arrays(program: Program, count: int = 12) -> list[Sized]:
  """Lists the largest arrays that instructions outside of fusions make, each shape once, the largest first."""
  found: dict[tuple[str, tuple[int, ...]], Sized] = {}
  for instruction, runs in program.instructions(fused=False):
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
      continue
    for array in instruction.arrays:
      found.setdefault((array.dtype, array.shape), Sized(array, instruction.opcode, instruction.op_name, runs))
  return sorted(found.values(), key=lambda sized: -sized.array.bytes)[:count]


def arrays_quadratic_in(program: Program, length: int) -> list[Sized]:
  """Lists the arrays, those inside fusions left out, that have two axes of `length` and more: T × T scores, masks."""
  return [
    sized for sized in largest_arrays(program, count=10**9) if sum(size >= length for size in sized.array.shape) >= 2
  ]


def hbm_bytes(program: Program) -> float:
  """Returns the bytes that a run reads from and writes to the chip's main memory."""
  return sum(runs * _bytes_moved(program, each) for each, runs in program.instructions(fused=False))


def hbm_bytes_by_operation(program: Program, count: int = 8) -> list[tuple[str, float]]:
  """Returns (operation, bytes) of those that move most."""
  total: dict[str, float] = collections.Counter()
  for instruction, runs in program.instructions(fused=False):
    name = f"{instruction.opcode} {instruction.op_name}".strip()
    total[name] += runs * _bytes_moved(program, instruction)
  return sorted(total.items(), key=lambda item: -item[1])[:count]


def _in_hbm(instruction: Instruction | None) -> int:
  return sum(array.bytes for array in instruction.arrays if array.in_hbm) if instruction is not None else 0


def _bytes_moved(program: Program, instruction: Instruction) -> float:
  """The bytes of one run of an instruction; slices count as slices, updates in place as what they write."""
  opcode, operands = instruction.opcode, program.operands(instruction)
  if opcode in _FREE or opcode.endswith("-done"):
    return 0
  if opcode == "dynamic-slice":
    return 2 * _in_hbm(instruction)
  if opcode == "dynamic-update-slice":
    return 2 * _in_hbm(operands[1])
  if opcode == "scatter":
    return 2 * _in_hbm(operands[-1]) + _in_hbm(operands[1])  # in place
  if opcode.endswith("-start"):
    written = sum(array.bytes for array in instruction.results if array.in_hbm)
    # A slice reads no more than it writes, be it elsewhere.
    is_slice = opcode in ("slice-start", "dynamic-slice-start")
    read = sum(array.bytes for array in instruction.results) if is_slice else sum(map(_in_hbm, operands))
    return written + read
  if opcode == "fusion":
    inner = next(name for how, name in instruction.called() if how == "calls")
    read = sum(
      _read_by_fusion(program, inner, number, _in_hbm(operand))
      for number, operand in enumerate(operands)
      if _in_hbm(operand)
    )
    return read + _written_by_fusion(program, inner, instruction)
  if instruction.target == KERNEL:
    stated = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
    if stated and int(stated[1]):
      return int(stated[1])
    # A result in the place of an operand, as an updated cache, is read once.
    reused = len(re.findall(r"\{\d*\}: \(\d+, \{", instruction.attributes))
    results = sorted(array.bytes for array in instruction.arrays if array.in_hbm)
    return _read_by_kernel(operands) + sum(results[: len(results) - reused])
  return _in_hbm(instruction) + sum(map(_in_hbm, operands))


def _read_by_kernel(operands: Sequence[Instruction | None]) -> float:
  """The operands of a kernel; of an array of pages, those that the largest table of numbers beside it can name."""
  arrays = [operand.arrays[0] for operand in operands if operand is not None and operand.arrays]
  named = max((math.prod(array.shape) for array in arrays if array.dtype == "s32" and len(array.shape) == 2), default=0)
  total = 0.0
  for array in (array for array in arrays if array.in_hbm):
    is_pages = named and len(array.shape) == 4 and array.shape[0] > named
    total += array.bytes * named / array.shape[0] if is_pages else array.bytes
  return total


def _written_by_fusion(program: Program, inner: str, fusion: Instruction) -> float:
  """The result of a fusion, or what it updates of an array in place."""
  root = next((each for each in program.computations[inner] if each.is_root), None)
  while root is not None and root.opcode in _SAME_BYTES and root.operands:
    root = program.find(inner, root.operands[0])
  if root is not None and root.opcode == "dynamic-update-slice":
    update = program.find(inner, root.operands[1])
    return update.bytes if update is not None else 0
  if root is not None and root.opcode == "scatter":
    updates = program.find(inner, root.operands[-1])
    return updates.bytes if updates is not None else 0
  return _in_hbm(fusion)


def _read_by_fusion(program: Program, inner: str, number: int, full: int) -> float:
  """The bytes that a fusion reads of one operand: those of the slices, where it only slices it."""
  body = program.computations.get(inner, ())
  start = next((each for each in body if each.opcode == "parameter" and each.operand_text.strip() == str(number)), None)
  if start is None:
    return full

  total, names = 0.0, [start.name]
  while names:
    name = names.pop()
    for user in (each for each in body if name in each.operands):
      if user.opcode in _SAME_BYTES:
        names.append(user.name)
      elif user.opcode in ("dynamic-slice", "gather") and user.operands[0] == name:
        total += user.bytes
      elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
        pass  # stays as it is
      elif user.opcode == "fusion":
        callee = next(called for how, called in user.called() if how == "calls")
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        total += sum(_read_by_fusion(program, callee, place, full) for place in places)
      else:
        return full
  return min(total, full)
