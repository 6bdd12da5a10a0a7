"""The roofline of a program: the time that its arithmetic, its memory traffic and its communication need at least."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sao_jax.pod.chips import Chip
from sao_jax.pod.matrix_products import Product

# Of the peak that a kernel of flash attention reaches; an assumption, from published utilisations of MaxText.
ATTENTION_EFFICIENCY = 0.6


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds of one run on each chip, were it bound by one thing alone.

  Attributes:
    mxu: the passes of all products at the chip's peak.
    kernels: the part of `mxu` that kernels of attention take.
    hbm: the memory traffic.
    ici: the communication, one collective after the other.
    efficiency: of kernels of attention, assumed.
  """

  mxu: float
  kernels: float
  hbm: float
  ici: float
  efficiency: float

  @property
  def mxu_expected(self) -> float:
    """`mxu` with kernels of attention at `efficiency`."""
    return self.mxu + self.kernels * (1 / self.efficiency - 1)

  @property
  def seconds(self) -> float:
    """The bound: arithmetic as expected, memory and communication overlap completely."""
    return max(self.mxu_expected, self.hbm, self.ici)

  @property
  def bound_by(self) -> str:
    """The one that takes longest."""
    times = {"MXU": self.mxu_expected, "HBM": self.hbm, "ICI": self.ici}
    return max(times, key=times.__getitem__)


def roofline(
  chip: Chip,
  products: Sequence[Product],
  hbm_bytes: float,
  wire: Mapping[str, tuple[float, float]],
  efficiency: float = ATTENTION_EFFICIENCY,
) -> Roofline:
  """Computes the roofline of a program.

  Args:
    chip: the chip.
    products: of the program, on one chip.
    hbm_bytes: that one chip moves.
    wire: of each mesh axis (or several, joined by "*"), the bytes that a chip sends, and bytes/s.
    efficiency: of kernels of attention.
  """
  passes = lambda found: sum(each.flops * each.passes * each.runs for each in found) / chip.flops
  return Roofline(
    mxu=passes(products),
    kernels=passes([each for each in products if each.is_attention]),
    hbm=hbm_bytes / chip.hbm_bandwidth,
    ici=sum(sent / bandwidth for sent, bandwidth in wire.values()),
    efficiency=efficiency,
  )


def utilisation(chip: Chip, model_flops: float, seconds: float) -> float:
  """Returns the share of a chip's peak that `model_flops` per chip are in `seconds` (MFU)."""
  return model_flops / (chip.flops * seconds) if seconds else 0.0
