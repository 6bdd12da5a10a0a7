"""The sizes that the TPU's kernel of ragged paged attention takes, checked before a compiler refuses them."""

from __future__ import annotations

import numpy as np

from sao_jax.errors import ConfigError
from sao_jax.sampler.paged_attention import KERNEL_POSITIONS, KERNEL_VMEM_BYTES

# Of a chip's scalar memory, which holds the page table: 1 MiB, and the kernel needs a little for itself.
SMEM_BYTES = 2**20 - 2**16
SMALLEST_PAGE = 16  # a block is copied page by page, each by an instruction of its own: smaller ones take minutes


def check_kernel(
  page_size: int, pages_per_slot: int, slots: int, kv_heads: int, width: int, itemsize: int
) -> ConfigError | None:
  """Returns what the kernel of one device would refuse; None if it takes these sizes.

  Args:
    page_size: positions of a page.
    pages_per_slot: pages of a full context.
    slots: those of a part of the mesh.
    kv_heads: key heads on one device.
    width: numbers of a head, padded.
    itemsize: bytes of a number.

  >>> check_kernel(128, 1024, 24, 4, 128, itemsize=2) is None
  True
  >>> check_kernel(8, 16384, 24, 4, 128, itemsize=2).remedy
  'use at least 16.'
  """
  # Pairs of heads fill registers whole, or in eighths.
  pairs = 2 * kv_heads * itemsize / 4
  if pairs not in (1, 2, 4) and pairs % 8:
    return ConfigError(
      "model.num_kv_heads",
      f"{kv_heads} key heads on each device, which the TPU's kernel of paged attention does not take.",
      "choose sampler.mesh.tensor so that 1, 2, 4 or a multiple of 8 remain, or set sampler.cache_layout='slots'.",
    )

  if page_size < SMALLEST_PAGE:
    return ConfigError(
      "sampler.page_size",
      f"pages of {page_size} tokens: the TPU's kernel would copy them one by one.",
      f"use at least {SMALLEST_PAGE}.",
    )

  table = 4 * slots * (pages_per_slot + -pages_per_slot % 128)
  if table > SMEM_BYTES:
    least = int(np.ceil(page_size * table / SMEM_BYTES / SMALLEST_PAGE)) * SMALLEST_PAGE
    return ConfigError(
      "sampler.page_size",
      f"a table of {pages_per_slot} pages for each of {slots} slots takes {table} bytes of a chip's scalar memory, "
      f"which has {SMEM_BYTES}.",
      f"use pages of {least} tokens or more, or fewer sampler.num_slots for each part of the mesh.",
    )

  # Two blocks of keys and values, one of which is read while the other arrives.
  heads = min(2 * kv_heads, 32 // itemsize) if 2 * kv_heads % (32 // itemsize) == 0 else 2 * kv_heads
  buffers = 2 * max(page_size, KERNEL_POSITIONS) * heads * width * itemsize
  if buffers > KERNEL_VMEM_BYTES // 2:
    return ConfigError(
      "sampler.page_size",
      f"pages of {page_size} tokens: two of them take {buffers} bytes of a chip's vector memory.",
      f"use at most {KERNEL_POSITIONS}.",
    )
  return None
