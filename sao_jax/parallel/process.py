"""Process start-up: JAX's own multi-controller runtime, joined as flags, environment variables or the TPU say."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import threading
from collections.abc import Mapping
from typing import NamedTuple

import jax
from absl import logging

from sao_jax.errors import ConfigError, ProcessFailed, RunError
from sao_jax.parallel.roll_call import TELL_SECONDS, Lines, call_roll

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "--coordinator", "--num_processes", "--process_id"
VARIABLES = {
  COORDINATOR: "JAX_COORDINATOR_ADDRESS",
  NUM_PROCESSES: "JAX_NUM_PROCESSES",
  PROCESS_ID: "JAX_PROCESS_ID",
}

HEARTBEAT_SECONDS = 30  # without a sign of life after which jax takes a process for dead, and ends the others
JOIN_SECONDS = 300  # to wait for the other processes at the start
LEAVE_SECONDS = 60  # to wait for them at the end
CPU_THREADS = "32"  # of a process that is one of several, on CPUs, where a collective blocks the thread that runs it

_EXAMPLE = "--coordinator=10.0.0.1:8476 --num_processes=2 --process_id=0"


class Joining(NamedTuple):
  """The place of a process among several.

  Attributes:
    coordinator: address and port of process 0, as in 10.0.0.1:8476.
    num_processes: of the run.
    process_id: of this process, from 0 on.
  """

  coordinator: str
  num_processes: int
  process_id: int


class DataShare(NamedTuple):
  """The share of a run's data (prompts, trajectories, host state) that a process brings: that of its sampler.

  Attributes:
    index: of the share, from 0 on; None for a process that brings none, since it only learns.
    count: all shares.
  """

  index: int | None = 0
  count: int = 1

  @property
  def brings(self) -> bool:
    """True if this process has a share."""
    return self.index is not None

  @property
  def first(self) -> bool:
    """True for one of the processes that bring a share, for what one of them does."""
    return self.index == 0


WHOLE = DataShare()


def joining(
  coordinator: str | None = None,
  num_processes: int | str | None = None,
  process_id: int | str | None = None,
  environment: Mapping[str, str] = os.environ,
) -> Joining | None:
  """Reads what flags say, and environment variables where a flag is missing; None where nothing is said.

  Raises:
    ConfigError: something is missing, is no number, or contradicts the rest.

  >>> joining("10.0.0.1:8476", 2, environment={"JAX_PROCESS_ID": "1"})
  Joining(coordinator='10.0.0.1:8476', num_processes=2, process_id=1)
  >>> joining(environment={}) is None
  True
  """
  given = {COORDINATOR: coordinator, NUM_PROCESSES: num_processes, PROCESS_ID: process_id}
  values = {flag: environment.get(VARIABLES[flag]) if value is None else value for flag, value in given.items()}
  names = {flag: VARIABLES[flag] if value is None else flag for flag, value in given.items()}

  # The address alone is what jax's own detection (Slurm, Open MPI, a TPU pod) may be given.
  missing = [flag for flag, value in values.items() if value in (None, "")]
  if len(missing) == 3 or (missing == [NUM_PROCESSES, PROCESS_ID] and coordinator is None):
    return None
  if missing:
    variables = " and ".join(VARIABLES[flag] for flag in missing)
    # Half a place would wait for the others for ever, or train alone.
    raise ConfigError(
      " and ".join(missing),
      "missing, and another of the three is given.",
      f"Set {variables}, or pass all, as in {_EXAMPLE}.",
    )

  # Whole numbers, of which one counts the other.
  numbers = {}
  for flag in (NUM_PROCESSES, PROCESS_ID):
    try:
      numbers[flag] = int(values[flag])
    except ValueError as error:
      raise ConfigError(names[flag], f"{values[flag]!r} is no whole number.", f"As in {_EXAMPLE}.") from error
  count, index = numbers[NUM_PROCESSES], numbers[PROCESS_ID]
  if count < 1:
    raise ConfigError(names[NUM_PROCESSES], f"there cannot be {count} processes.", "Give the number of all of them.")
  if not 0 <= index < count:
    problem = f"{index} is none of {count} processes."
    raise ConfigError(names[PROCESS_ID], problem, f"Number them from 0 to {count - 1}, each with its own.")

  host, _, port = str(values[COORDINATOR]).rpartition(":")
  if not host or not port.isdigit() or not 0 < int(port) < 2**16:
    problem = f"{values[COORDINATOR]!r} is no address with a port."
    raise ConfigError(names[COORDINATOR], problem, "Name process 0's, the same for all, as in 10.0.0.1:8476.")
  return Joining(values[COORDINATOR], count, index)


def initialize_processes(
  coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the other processes of a run; does nothing where there is one alone. Call it before any other use of jax.

  Arguments come first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then what jax detects by
  itself: a TPU pod, or several tasks of Slurm or Open MPI.

  Raises:
    ConfigError: the arguments or variables are incomplete or contradictory.
    RunError: the others were not found in time, or one of them cannot come.
  """
  join_processes(joining(coordinator, num_processes, process_id)).close()


def join_processes(place: Joining | None = None, seconds: float = JOIN_SECONDS) -> Lines:
  """Joins as `initialize_processes` does, and returns connections that tell of the death of others.

  Args:
    place: what `joining` has found; None: what it finds in variables, or jax by itself.
    seconds: to wait for the others.
  """
  place = place or joining()

  # Where there are no others nothing is started.
  if jax.distributed.is_initialized() or (place is None and not _detected()):
    return Lines()
  if place is not None and place.num_processes == 1:
    return Lines()  # nobody to join

  # Stopping is agreed on by the run itself: jax's own service would take the signals.
  jax.config.update("jax_enable_preemption_service", False)
  # CPUs would run programs that do not need each other at the same time, on every process in an order of its own: two
  # with collectives then wait for each other for ever. Other devices keep the order in which programs are dispatched.
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  # Within a program, collectives over different axes run at the same time. With as many threads as there are cores,
  # some could take them all, on another process others, and all would wait for ever.
  os.environ.setdefault("PJRT_NPROC", CPU_THREADS)

  place = place or _jax_place(seconds)
  lines = Lines() if place is None else _call_roll(place, seconds)
  options = {} if place is None else {"coordinator_bind_address": _bind_address(place.coordinator)}
  try:
    jax.distributed.initialize(
      *(place or ()),
      **options,
      initialization_timeout=JOIN_SECONDS,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=LEAVE_SECONDS,
    )
  except jax.errors.JaxRuntimeError as error:
    own = "" if place is None else f"Process {place.process_id} of {place.num_processes} at {place.coordinator}: "
    raise RunError(f"{own}jax could not join the processes of the run ({error}).") from error
  logging.info("Process %d of %d.", jax.process_index(), jax.process_count())
  return lines


def tell_of_failure(place: Joining | None, error: BaseException, status: int) -> None:
  """Lets the others know that this process has failed before it joined, so that none waits for it.

  Takes as long as they need to come, and a minute at most. Does nothing where there are no others.
  """
  place = place or (_jax_place(TELL_SECONDS) if _detected() else None)
  if place is None or place.num_processes == 1:
    return
  message = f"Process {place.process_id} has failed before all had joined ({type(error).__name__}: {error})."
  with contextlib.suppress(RunError):
    _call_roll(place, TELL_SECONDS, ProcessFailed(message, place.process_id, status))


def _call_roll(place: Joining, seconds: float, failure: ProcessFailed | None = None) -> Lines:
  loopback = _bind_address(place.coordinator) is not None
  return call_roll(place.coordinator, *place[1:], seconds, loopback=loopback, failure=failure)


def _jax_place(seconds: float) -> Joining | None:
  """The place that jax detects; None if it detects none, or does so in another way than the version that is known."""
  from jax._src import clusters  # there is no public name

  detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
  address = os.environ.get(VARIABLES[COORDINATOR])
  try:
    place = detect(address, None, None, None, None, int(seconds))[:3]
  except (KeyError, TypeError) as error:
    logging.info("There is no roll call before jax joins the processes: %r", error)
    return None
  return None if None in place else Joining(*place)


def leave_processes(seconds: float = LEAVE_SECONDS) -> None:
  """Leaves together with the others, so that none takes a process that has done its work for dead.

  Waits for the others for at most `seconds`; does nothing on one process.
  """
  if not jax.distributed.is_initialized():
    return

  def leave() -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others have gone already
      jax.distributed.shutdown()

  leaving = threading.Thread(target=leave, name="leaving", daemon=True)
  leaving.start()
  leaving.join(seconds)


def own_address(coordinator: str) -> str:
  """The address of this host in the network in which it reaches the host `coordinator`; nothing is sent there."""
  family, kind, protocol, _, place = socket.getaddrinfo(coordinator.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, kind, protocol) as probe:
    probe.connect(place)
    return probe.getsockname()[0]


def _bind_address(coordinator: str) -> str | None:
  """The address that process 0 listens at: only the loopback's where that is meant; None: jax's default, all."""
  host = coordinator.rpartition(":")[0]
  return coordinator if host == "localhost" or host.startswith("127.") else None


def _detected() -> bool:
  """Tells if jax finds other processes by itself."""
  return (
    _on_pod()
    or _among_tasks("SLURM_STEP_NODELIST", "SLURM_NTASKS")
    or _among_tasks("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE")
  )


def _among_tasks(marker: str, count: str) -> bool:
  """Tells if a launcher of several tasks, which sets the variable `marker`, has started this process."""
  number = os.environ.get(count, "")
  return marker in os.environ and number.isdigit() and int(number) > 1


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
