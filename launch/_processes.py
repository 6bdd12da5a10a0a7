"""Several processes that run one program: the flags by which they find each other, and a common end."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

import jax
from absl import flags, logging

from launch import stop
from sao_jax import interrupt
from sao_jax.errors import EXIT_FAILURE, ConfigError
from sao_jax.parallel.agreement import Processes, ProcessFailed, all_processes
from sao_jax.parallel.process import JOIN_SECONDS, Joining, join_processes, joining, leave_processes, tell_of_failure
from sao_jax.parallel.slow_abort import slow_abort
from sao_jax.parallel.watch import deaths_watched, leave_failed, watched

FULL = errno.ENOSPC, errno.EDQUOT  # what a full disk says

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
  text = "Seconds to wait for the others at the start."
  flags.DEFINE_float("join_timeout", JOIN_SECONDS, text, lower_bound=1.0, flag_values=flag_values)


def joining_of(flag_values: flags.FlagValues) -> Joining | None:
  """Returns the place that flags or variables name, see `joining`; raises ConfigError for half of one."""
  return joining(*(flag_values[flag].value for flag in FLAGS))


def flag_value(argv: Sequence[str], flag: str) -> str | None:
  """Looks for `--FLAG=VALUE` or `--FLAG VALUE`: the file must be known before its fields can be read."""
  found = None
  for index, argument in enumerate(argv):
    name, given, value = argument.partition("=")
    if name in (f"--{flag}", f"-{flag}"):
      found = value if given else "".join(argv[index + 1 : index + 2])
  return found


def tell(argv: Sequence[str], error: BaseException, status: int) -> None:
  """Tells the other processes of a run that a command has failed here before it joined, if it names any."""
  with contextlib.suppress(ConfigError):  # it does not say which of them it is
    tell_of_failure(joining(*(flag_value(argv, flag) for flag in FLAGS)), error, status)


@contextlib.contextmanager
def joined(
  place: Joining | None, say: Callable[[BaseException], int | None] = lambda error: None, seconds: float = JOIN_SECONDS
) -> Iterator[None]:
  """Joins the other processes, and leaves together with them.

  What ends this process before the others are done is told to them, whatever it is, so that none waits for it, and all
  end with its status. The process ends at once then: jax would wait for the others at the exit, and they may wait in a
  collective for this one.

  Args:
    place: of this process; None where jax finds the others itself, or there are none.
    say: says what an error means, and returns the exit status; None for one that nobody expected.
    seconds: to wait for the others at the start.
  """
  lines = join_processes(place, seconds)
  processes = all_processes()
  if processes.count == 1:
    yield
    return

  slow_abort()
  end = functools.partial(_end_with, processes)
  with watched(processes, end), deaths_watched(processes, lines, _end_without_store), _signals_are_told(processes):
    try:
      yield
      processes.gather("the end of the program", None)  # jax would wait for those that still work a minute only
    except SystemExit:  # of all, or it would be a failure
      leave_processes()
      raise
    except BaseException as error:
      _end_with(processes, error, say(error))
  leave_processes()


def _end_with(processes: Processes, error: BaseException, status: int | None = None) -> NoReturn:
  """Ends this process because of an error, of its own or of another process, which all others are told."""
  if isinstance(error, ProcessFailed) and status is None:  # found by the thread that watches
    logging.error("%s This process waits for it where nothing else tells it, and ends.", error)
  elif status is None:
    logging.error("Process %d of %d has failed.", processes.index, processes.count, exc_info=error)
    if isinstance(error, jax.errors.JaxRuntimeError):
      logging.error(
        "An error of the devices or of their connection: another process may have died, whose own log says more. The "
        "same command goes on from the newest checkpoint."
      )
  status = EXIT_FAILURE if status is None else status
  processes.fail(error, status)

  # The first failure of all is the reason of the others.
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store is gone
    first = processes.failure()
    if first is not None:
      status = first.status
    if first is not None and first.process != processes.index and not isinstance(error, ProcessFailed):
      logging.error("%s", first)
  leave_failed(processes)
  _exit(status)


def _end_without_store(error: ProcessFailed) -> NoReturn:
  """Ends this process because the one that keeps the store of all has died: nobody can be told."""
  logging.error("%s The same command goes on from the newest checkpoint.", error)
  _exit(error.status)


def _exit(status: int) -> NoReturn:
  logging.flush()
  for stream in (sys.stdout, sys.stderr):
    stream.flush()
  os._exit(status)


@contextlib.contextmanager
def _signals_are_told(processes: Processes) -> Iterator[None]:
  """Lets the others know of a signal that ends this process at once, such as a second Ctrl-C; all end with its status.

  Handlers that somebody else has set stay.
  """
  ends = {signal.SIG_DFL: interrupt.end, stop: stop}
  told, telling = [], threading.RLock()

  def handle(number: int, frame: FrameType | None) -> None:
    end = ends[previous[number]]
    with telling:  # the main thread and the one of `Interrupt` both get a signal
      if not told:
        told.append(number)
        processes.fail(f"it was ended by {signal.Signals(number).name}", 128 + number)
        leave_failed(processes)
      end(number, frame)

  setattr(handle, interrupt.ENDS_PROCESS, True)
  previous = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
  previous = {number: handler for number, handler in previous.items() if handler in ends}
  for number in previous:
    signal.signal(number, handle)
  try:
    yield
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
