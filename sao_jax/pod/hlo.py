"""An optimised program as XLA prints it, read: its computations, how often each of them runs, and their instructions.

`compiled.as_text()` enters. Loops are multiplied out: an instruction of a layer's body counts once for every layer, so
that sums over instructions are sums over a run of the program, on one chip.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

ITEM_BYTES = {
  **dict.fromkeys(("s4", "u4"), 0.5),
  **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
  **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
  **dict.fromkeys(("s32", "u32", "f32"), 4),
  **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_ARRAY = re.compile(rf"\b({'|'.join(ITEM_BYTES)})\[([\d,]*)\](\{{[^}}]*\}})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{"n":\s*"?(\d+)')
_OFF_CHIP_MEMORY = re.compile(r"S\([1-9]\)")  # of a layout: not in HBM, but in VMEM or in a scalar memory


@dataclasses.dataclass(frozen=True)
class Array:
  """An array of an instruction's result.

  Attributes:
    dtype: as XLA names it, "bf16".
    shape: its dimensions, on one chip.
    in_hbm: it lives in the chip's main memory, and not in VMEM.
  """

  dtype: str
  shape: tuple[int, ...]
  in_hbm: bool = True

  @property
  def bytes(self) -> int:
    """Its size without the padding of tiles."""
    return int(ITEM_BYTES[self.dtype] * math.prod(self.shape))

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: unique in its computation.
    type: the text of the result's type.
    opcode: as "fusion", "all-gather-start".
    operands: names of the instructions that it reads.
    operand_text: what stands in the brackets, as a constant's value or a parameter's number.
    attributes: the text behind the brackets.
    is_root: its result is that of the computation.
    computation: the name of the computation that it stands in.
  """

  name: str
  type: str
  opcode: str
  operands: tuple[str, ...]
  operand_text: str
  attributes: str
  is_root: bool
  computation: str

  @property
  def arrays(self) -> tuple[Array, ...]:
    """The arrays of the result, those of a tuple in order."""
    return arrays_of(self.type)

  @property
  def results(self) -> tuple[Array, ...]:
    """The arrays of the result, without those that the start of an asynchronous operation names besides.

    A start's result holds its operands again, in brackets of their own or before the results, and flags. That of a copy
    begins with the copy.
    """
    if not self.opcode.endswith("-start"):
      return self.arrays
    if self.opcode == "copy-start":
      return self.arrays[:1]
    if self.type.startswith("(("):
      repeated = len(arrays_of(self.type[1 : _closing_bracket(self.type, 2)]))
      return tuple(array for array in self.arrays[repeated:] if array.shape)
    arrays = [array for array in self.arrays if array.shape] or list(self.arrays)
    paired = self.opcode in ("all-gather-start", "collective-permute-start")
    return tuple(arrays[len(arrays) // 2 :] if paired else arrays)

  @property
  def bytes(self) -> int:
    """Of all arrays of the result."""
    return sum(array.bytes for array in self.arrays)

  @property
  def op_name(self) -> str:
    """The path of the operation in the traced program, as "jit(train_step)/while/body/dot_general"; may be empty."""
    match = re.search(r'op_name="([^"]*)"', self.attributes)
    return match[1] if match else ""

  @property
  def target(self) -> str:
    """The kind of a custom call, as "tpu_custom_call" (a Pallas kernel); otherwise empty."""
    match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
    return match[1] if match else ""

  def called(self) -> Iterator[tuple[str, str]]:
    """Yields (how, name) of the computations that it calls; how: "body", "to_apply", "branch", ..."""
    yield from _CALLED.findall(self.attributes)
    for how, names in _CALLED_LISTS.findall(self.attributes):
      for name in names.split(","):
        yield how.removesuffix("_computations"), name.strip().lstrip("%")


@dataclasses.dataclass(frozen=True)
class Program:
  """A program with the number of times that each of its computations runs.

  Attributes:
    computations: the instructions of each computation, in order.
    entry: the name of the one that runs first.
    runs: how often a computation runs; of a branch of a conditional, the share that `parse` was told.
    fused: the computations inside fusions, reductions and the like, whose results live in no memory of their own.
    unknown_loops: names of the loops whose number of rounds depends on data.
  """

  computations: Mapping[str, tuple[Instruction, ...]]
  entry: str
  runs: Mapping[str, float]
  fused: frozenset[str]
  unknown_loops: tuple[str, ...]

  @functools.cached_property
  def _by_name(self) -> dict[str, dict[str, Instruction]]:
    return {name: {each.name: each for each in body} for name, body in self.computations.items()}

  def find(self, computation: str, name: str) -> Instruction | None:
    """The instruction of that name, None where there is none."""
    return self._by_name.get(computation, {}).get(name)

  def operands(self, instruction: Instruction) -> tuple[Instruction | None, ...]:
    """The instructions that it reads."""
    return tuple(self.find(instruction.computation, name) for name in instruction.operands)

  def instructions(self, *, fused: bool) -> Iterator[tuple[Instruction, float]]:
    """Yields every instruction that runs, and how often; without those inside fusions unless `fused`."""
    for name, body in self.computations.items():
      if self.runs.get(name) and (fused or name not in self.fused):
        for instruction in body:
          yield instruction, self.runs[name]


@functools.lru_cache(maxsize=100_000)
def arrays_of(type_text: str) -> tuple[Array, ...]:
  """Reads the arrays of a type.

  >>> [str(array) for array in arrays_of("(bf16[8,128]{1,0:T(8,128)(2,1)}, pred[])")]
  ['bf16[8,128]', 'pred[]']
  """
  return tuple(
    Array(dtype, tuple(int(size) for size in sizes.split(",") if size), not _OFF_CHIP_MEMORY.search(layout))
    for dtype, sizes, layout in _ARRAY.findall(type_text)
  )


def parse(text: str, *, unknown_trips: int = 1, branch_share: float = 1.0) -> Program:
  """Reads the text of an optimised program.

  Args:
    text: as `compiled.as_text()` returns it.
    unknown_trips: rounds of a loop in the entry computation whose number depends on data, as that of decode does;
      such a loop inside another one counts as one round.
    branch_share: share of the runs of a conditional in which each of its branches is taken; 1: every one, always.

  Raises:
    ValueError: the text has no entry computation.
  """
  # Computations are blocks of lines between a header and a brace; everything else is tables of names.
  computations: dict[str, list[Instruction]] = {}
  entry = current = None
  for line in _logical_lines(text):
    if line == "}":
      current = None
    elif not line.startswith(" "):
      header = _HEADER.match(line)
      current = header[2]
      computations[current] = []
      entry = current if header[1] else entry
    elif current is not None and (instruction := _read(line, current)):
      computations[current].append(instruction)
  if entry is None:
    raise ValueError("this is no program: no line begins with ENTRY")

  bodies = {name: tuple(body) for name, body in computations.items()}
  runs, unknown = _count_runs(bodies, entry, unknown_trips, branch_share)
  return Program(bodies, entry, runs, _fused(bodies), unknown)


def _logical_lines(text: str) -> Iterator[str]:
  """Yields headers, instructions and braces. Metadata of a kernel may break a line, which goes on in the next one."""
  parts: list[str] = []
  for line in text.splitlines():
    is_header = line.endswith("{") and not line.startswith(" ") and _HEADER.match(line)
    if is_header or line.rstrip() == "}" or _INSTRUCTION.match(line):
      if parts:
        yield " ".join(parts)
      parts = [line.rstrip()]
    elif parts and parts[0] != "}":
      parts.append(line)
  if parts:
    yield " ".join(parts)


def _read(line: str, computation: str) -> Instruction | None:
  match = _INSTRUCTION.match(line)
  if match is None:
    return None
  end = _closing_bracket(line, match.end())
  inside = line[match.end() : end]
  return Instruction(
    match[2],
    match[3],
    match[4],
    tuple(_OPERAND.findall(inside)),
    inside,
    line[end + 1 :],
    bool(match[1]),
    computation,
  )


def _closing_bracket(line: str, start: int) -> int:
  """The index of the bracket that closes the one before `start`."""
  depth = 1
  for bracket in re.compile(r"[()]").finditer(line, start):
    depth += 1 if bracket[0] == "(" else -1
    if not depth:
      return bracket.start()
  return len(line)


def trip_count(loop: Instruction, computations: Mapping[str, tuple[Instruction, ...]]) -> int | None:
  """The rounds of a `while`: as the compiler notes it, or those of a count from 0 up to a constant; None: unknown."""
  noted = _TRIP_COUNT.search(loop.attributes)
  if noted:
    return int(noted[1])

  condition = computations.get(dict(loop.called()).get("condition", ""), ())
  named = {each.name: each for each in condition}
  root = next((each for each in condition if each.is_root), None)
  if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
    return None
  limit = named.get(root.operands[1])
  return int(limit.operand_text) if limit is not None and limit.opcode == "constant" else None


def _count_runs(
  computations: Mapping[str, tuple[Instruction, ...]], entry: str, unknown_trips: int, branch_share: float
) -> tuple[dict[str, float], tuple[str, ...]]:
  """The number of runs of each computation, callers before the called; and the loops of unknown length."""
  order: list[str] = []
  seen: set[str] = set()
  stack = [(entry, False)]
  while stack:
    name, done = stack.pop()
    if done:
      order.append(name)
    elif name not in seen and name in computations:
      seen.add(name)
      stack.append((name, True))
      stack += [(callee, False) for each in computations[name] for _, callee in each.called()]

  runs: dict[str, float] = collections.defaultdict(int, {entry: 1})
  unknown = []
  for name in reversed(order):
    for instruction in computations[name]:
      trips = branch_share if instruction.opcode == "conditional" and branch_share != 1 else 1
      if instruction.opcode == "while":
        known = trip_count(instruction, computations)
        if known is None:
          unknown.append(instruction.name)
          known = unknown_trips if name == entry else 1
        trips = known
      for _, callee in instruction.called():
        runs[callee] += runs[name] * trips
  return dict(runs), tuple(unknown)


def _fused(computations: Mapping[str, tuple[Instruction, ...]]) -> frozenset[str]:
  """The computations that fusions, and operations with a function as reductions are, call, directly or not."""
  called = [
    callee
    for body in computations.values()
    for each in body
    for how, callee in each.called()
    if each.opcode == "fusion" or (how == "to_apply" and each.opcode != "call")
  ]
  fused: set[str] = set()
  while called:
    name = called.pop()
    if name not in fused:
      fused.add(name)
      called += [callee for each in computations.get(name, ()) for _, callee in each.called()]
  return frozenset(fused)
