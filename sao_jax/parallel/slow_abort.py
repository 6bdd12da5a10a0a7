"""Time between an abort of this process and its end, for a last word.

When the process that keeps the store of all dies, jax aborts the others as soon as their connection to it ends, by a
status and with lines that say little. Another thread of the process knows more, but is not faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal


def slow_abort() -> None:
  """Lets the thread that aborts this process sleep for six seconds first, in which the others go on.

  The handler of SIGABRT becomes the C function `sleep`: it gets the number of the signal, 6, as its argument, may be
  called in a handler, and needs nothing that the process may have lost. A handler of Python would not hold up anything.
  Stacks are still shown, where they were.
  """
  shows_stacks = faulthandler.is_enabled()
  faulthandler.disable()  # its handler calls the one before it
  with contextlib.suppress(OSError, AttributeError):  # no such C library
    library = ctypes.CDLL(None)
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
  if shows_stacks:
    faulthandler.enable()
