"""Several processes that run one program: the flags by which they find each other, and a common end."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator

import jax
from absl import flags, logging

from sao_jax.errors import ConfigError, RunError
from sao_jax.interrupt import Interrupted
from sao_jax.parallel.agreement import all_processes
from sao_jax.parallel.process import Joining, initialize_processes, joining, leave_processes

TELLING_SECONDS = 3.0  # for the others to read why process 0 has failed: their common store ends with it

FULL = errno.ENOSPC, errno.EDQUOT  # what a full disk says

_SAID = ConfigError, RunError, Interrupted  # errors that the program ends with in its own way, and a full disk

FLAGS = ("coordinator", "num_processes", "process_id")


def define_flags(flag_values: flags.FlagValues) -> None:
  """Defines the flags that name the place of this process among several."""
  text = "Of several processes: address and port of process 0, as in 10.0.0.1:8476; or JAX_COORDINATOR_ADDRESS."
  flags.DEFINE_string("coordinator", None, text, flag_values=flag_values)
  text = "How many processes run this program together; or JAX_NUM_PROCESSES."
  flags.DEFINE_integer("num_processes", None, text, flag_values=flag_values)
  flags.DEFINE_integer(
    "process_id", None, "This one among them, from 0 on; or JAX_PROCESS_ID.", flag_values=flag_values
  )


def joining_of(flag_values: flags.FlagValues) -> Joining | None:
  """Returns the place that flags or variables name, see `joining`; raises ConfigError for half of one."""
  return joining(*(flag_values[flag].value for flag in FLAGS))


@contextlib.contextmanager
def joined(place: Joining | None) -> Iterator[None]:
  """Joins the other processes, and leaves together with them.

  What ends this process before the others are done is told to them, so that they do not wait for it. Then it ends at
  once: jax would wait for the others at the exit, and they may wait in a collective for this one.
  """
  initialize_processes(*(place or ()))
  processes = all_processes()
  try:
    yield
  except SystemExit:
    leave_processes()
    raise
  except BaseException as error:
    if processes.count == 1:
      raise
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store may be gone
      processes.fail(error)
    if processes.is_writer:
      time.sleep(TELLING_SECONDS)
    if isinstance(error, _SAID) or (isinstance(error, OSError) and error.errno in FULL):
      raise
    logging.exception("Process %d of %d has failed.", processes.index, processes.count)
    if isinstance(error, jax.errors.JaxRuntimeError):
      logging.error(
        "An error of the devices or of their connection: another process may have died, whose own log says more. The "
        "same command goes on from the newest checkpoint."
      )
    logging.flush()
    os._exit(1)
  leave_processes()
