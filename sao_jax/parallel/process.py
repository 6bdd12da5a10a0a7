"""Process start-up: JAX's own multi-controller runtime, nothing home-made."""

from __future__ import annotations

import glob
import os

import jax


def initialize_processes(
  coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the other hosts of a TPU pod; does nothing on a single host. Call it before any other use of jax.

  On a pod jax finds its peers without arguments. Elsewhere (several CPU or GPU hosts) pass all three of them.
  """
  if jax.distributed.is_initialized():
    return
  if coordinator_address is not None or _on_pod():
    jax.distributed.initialize(coordinator_address, num_processes, process_id)


def data_process_index() -> int:
  """The share of the prompts that this process reads: data axes span hosts, "tensor" and "context" stay inside one."""
  return jax.process_index()


def data_process_count() -> int:
  """The number of shares that the prompts are split into."""
  return jax.process_count()


def _on_pod() -> bool:
  if "MEGASCALE_COORDINATOR_ADDRESS" in os.environ:
    return True
  hosts = os.environ.get("TPU_WORKER_HOSTNAMES")
  if hosts is not None:
    return "," in hosts
  # A TPU VM that tells its worker list through the metadata server only; its chips are visible as devices.
  has_chips = bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
  wants_tpu = "tpu" in os.environ.get("JAX_PLATFORMS", "tpu") and "TPU_SKIP_MDS_QUERY" not in os.environ
  return has_chips and wants_tpu
