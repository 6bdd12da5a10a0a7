"""Programs: each parses its flags and calls the library."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

EXIT_INTERRUPTED = 130  # as shells have it


def stop(number: int, frame: FrameType | None) -> None:
  """Ctrl-C where no `sao_jax.interrupt.Interrupt` waits for a good moment: one line, and the process is gone.

  Checkpoints and folders appear whole or not at all, whatever ends the process. An exception would not always arrive:
  while jax is imported most of the time goes to callbacks of the garbage collector, which print it and go on.
  """
  os.write(2, b"Interrupted.\n")
  os._exit(EXIT_INTERRUPTED)


# `python -m launch.NAME` is looking for NAME, whose imports take seconds. A shell may have had SIGINT ignored.
if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, stop)
