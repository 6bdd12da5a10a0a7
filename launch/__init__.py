"""Programs: each parses its flags and calls the library."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType

EXIT_INTERRUPTED = 130  # as shells have it


def stop(number: int, frame: FrameType | None) -> None:
  """Ends the process with one line, on a Ctrl-C for which no `sao_jax.interrupt.Interrupt` waits.

  Nothing is lost: checkpoints and folders appear whole or not at all, whatever ends the process. An exception would not
  always arrive. While jax is imported, most of the time goes to callbacks of the garbage collector, which print an
  exception and go on.
  """
  os.write(2, b"Interrupted.\n")
  os._exit(EXIT_INTERRUPTED)


stop.ends_process = True  # see sao_jax.interrupt


def show_and_tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
  """Shows an error that ends the program before it has joined the other processes of its run, and tells them."""
  sys.__excepthook__(kind, error, trace)
  if issubclass(kind, Exception):
    with contextlib.suppress(Exception):  # what cannot be imported may be needed here as well
      from launch._processes import tell

      tell(sys.argv, error, 1)


# `python -m launch.NAME` is looking for NAME, whose imports take seconds. A shell may have had SIGINT ignored.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, stop)
if sys.argv[0] == "-m":
  sys.excepthook = show_and_tell  # for a package that is missing on one host, or an error of its configuration
