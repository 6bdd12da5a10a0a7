"""Programs: each parses its flags and calls the library."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

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

# `python -m launch.NAME` is looking for NAME, whose imports take seconds. A shell may have had SIGINT ignored.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, stop)
