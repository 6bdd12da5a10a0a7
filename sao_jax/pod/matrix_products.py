"""Matrix products of a program: FLOPs of its dots and convolutions, and those of its Pallas kernels."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np

from sao_jax.pod.hlo import Instruction, Program

# Passes of the matrix unit, whose inputs are bf16, for one product of fp32 numbers.
PASSES = {"default": 1, "high": 3, "highest": 6}
KERNEL = "tpu_custom_call"
# Products of [queries, keys] scores in each kernel of flash attention: of q kᵀ, and those that follow from it.
ATTENTION_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4, "fused": 5}

_LARGEST_WINDOW = 4_000_000  # of pairs that are counted one by one


@dataclasses.dataclass(frozen=True)
class Product:
  """A matrix product, or a kernel of several.

  Attributes:
    flops: of one run, 2 for a multiplication with its addition.
    passes: of the matrix unit over them, more than 1 for products of higher precision than bf16.
    runs: how often it runs.
    kernel: the name of the Pallas kernel; empty for XLA's own products.
    op_name: the operation in the traced program.
  """

  flops: float
  passes: int
  runs: float
  kernel: str
  op_name: str

  @property
  def is_attention(self) -> bool:
    """A kernel of attention, of which much less than the peak is reached."""
    return "attention" in self.kernel or "splash" in self.kernel or "mha" in self.kernel or "mqa" in self.kernel


def products(program: Program) -> tuple[Product, ...]:
  """Lists the products of a program, those inside fusions too."""
  found = []
  for instruction, runs in program.instructions(fused=True):
    if instruction.opcode == "convolution":
      flops = convolution_flops(program, instruction)
    elif instruction.opcode == "dot":
      flops = dot_flops(program, instruction)
    elif instruction.target == KERNEL:
      flops = kernel_flops(program, instruction)
    else:
      continue
    kernel = re.sub(r"[.\d]+$", "", instruction.name) if instruction.target == KERNEL else ""
    found.append(Product(flops, _passes(instruction), runs, kernel, instruction.op_name))
  return tuple(found)


def kernels(program: Program) -> dict[str, float]:
  """Counts the runs of each Pallas kernel, by name."""
  counts: dict[str, float] = {}
  for product in products(program):
    if product.kernel:
      counts[product.kernel] = counts.get(product.kernel, 0) + product.runs
  return counts


def dot_flops(program: Program, dot: Instruction) -> float:
  """2 · size of the result · size of what is contracted."""
  lhs = program.operands(dot)[0]
  match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
  contracted = [lhs.arrays[0].shape[int(axis)] for axis in match[1].split(",") if axis] if match and lhs else []
  return 2.0 * math.prod(dot.arrays[0].shape) * math.prod(contracted)


def convolution_flops(program: Program, convolution: Instruction) -> float:
  """2 · batch · features · input features · pairs of an output and a window position that lie inside the input.

  A TPU writes its matrix products as convolutions; batched ones have spatial dimensions with padding.
  """
  lhs, rhs = program.operands(convolution)
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
  left, right, out = labels.groups()
  shape = convolution.arrays[0].shape

  total = 2.0 * shape[out.index("b")] * shape[out.index("f")] * rhs.arrays[0].shape[right.index("i")]
  match = re.search(r"window=\{([^}]*)\}", convolution.attributes)
  window = dict(field.split("=") for field in match[1].split()) if match else {}
  for axis in sorted(set(left) - {"b", "f"}):
    total *= _window_pairs(lhs.arrays[0].shape[left.index(axis)], shape[out.index(axis)], window, int(axis))
  return total


def _window_pairs(inputs: int, outputs: int, window: dict[str, str], axis: int) -> int:
  """The pairs (output, window position) along a spatial axis that meet an input."""
  field = lambda name, default: window[name].split("x")[axis] if name in window else default
  size, stride = int(field("size", "1")), int(field("stride", "1"))
  dilation, rhs_dilation = int(field("lhs_dilate", "1")), int(field("rhs_dilate", "1"))
  low = int(field("pad", "0_0").split("_")[0])
  if size * outputs > _LARGEST_WINDOW:
    return max(size, outputs)
  index = np.arange(outputs)[:, None] * stride + np.arange(size) * rhs_dilation - low
  return int(((index >= 0) & (index <= (inputs - 1) * dilation) & (index % dilation == 0)).sum())


def kernel_flops(program: Program, kernel: Instruction) -> float:
  """FLOPs of a Pallas kernel: as it says itself; for flash attention from its shapes, causal; 0 for others.

  A grouped product counts all of its rows, whether they hold a token or not.
  """
  stated = re.search(r'"cost_estimate":\{"flops":"?(\d+)', kernel.attributes)
  if stated:
    return float(stated[1])
  name = kernel.name
  if "splash" not in name and "mha" not in name and "mqa" not in name:
    return 0.0

  # Operands of [.., heads, length, width]: queries, keys, values; earlier ones are tables of blocks.
  wide = [each.arrays[0].shape for each in program.operands(kernel) if each and each.arrays and _is_wide(each)]
  if len(wide) < 3:
    return 0.0
  q, k, v = wide[:3]
  scores = math.prod(q[:-1]) * k[-2] / 2  # half of them lie before the query
  # One that gives partial gradients of queries, too: [.., blocks of keys, heads, length, width].
  fused = "dkv" in name and any(len(shape) > len(q) and shape[-3:] == q[-3:] for shape in _shapes(kernel))
  part = "fwd" if "fwd" in name else "dq" if "dq" in name else "fused" if fused else "dkv"
  on_keys = {"fwd": 1, "dq": 2, "dkv": 2, "fused": 3}[part]
  return 2.0 * scores * (on_keys * q[-1] + (ATTENTION_PRODUCTS[part] - on_keys) * v[-1])


def _shapes(instruction: Instruction) -> list[tuple[int, ...]]:
  return [array.shape for array in instruction.arrays]


def _is_wide(instruction: Instruction) -> bool:
  array = instruction.arrays[0]
  return len(array.shape) >= 3 and array.dtype in ("bf16", "f32")


def _passes(instruction: Instruction) -> int:
  match = re.search(r"operand_precision=\{([\w,]+)\}", instruction.attributes)
  return max(PASSES.get(name, 1) for name in match[1].split(",")) if match else 1


def largest_products(found: tuple[Product, ...], count: int = 8) -> list[tuple[str, float]]:
  """Sums the products by operation, and returns (operation, FLOPs) of the largest ones."""
  key = lambda product: product.kernel or product.op_name
  groups = itertools.groupby(sorted(found, key=key), key=key)
  total = [(name, sum(each.flops * each.runs for each in members)) for name, members in groups]
  return sorted(total, key=lambda item: -item[1])[:count]
