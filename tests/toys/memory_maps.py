"""Memory maps of this process: every compiled program takes a few, and Linux allows one process 65,530.

Beyond them the compiler ends in a segmentation fault, far from what filled them. Programs are therefore given back
once there are many; below that, modules share what they have compiled.
"""

from __future__ import annotations

import gc
import pathlib

import jax

from toys import shared_steps

RELEASED_BEYOND = 20_000  # maps that are left to programs which later modules may need
MOST = 40_000  # at the end of a module: its own programs, and none of those before it beyond RELEASED_BEYOND
MAPS = pathlib.Path("/proc/self/maps")


class TooManyMaps(AssertionError):
  """A module of tests came too near the limit of the system."""


def count() -> int:
  """Number of memory maps of this process; 0 where the system does not say."""
  return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def release(module: str, *, beyond: int = RELEASED_BEYOND, most: int = MOST) -> bool:
  """Gives back all compiled programs once the process has too many maps; returns whether it did.

  Args:
    module: name of the module that has just ended, for the message.
    beyond: number of maps up to which programs stay.
    most: number of maps that no module may leave behind.

  Raises:
    TooManyMaps: when there are more than `most`; the programs are given back all the same, so that later modules run.
  """
  maps = count()
  if maps <= beyond:
    return False
  gc.unfreeze()  # what modules have left behind refers to programs, too
  shared_steps.clear()
  jax.clear_caches()
  gc.collect()

  if maps > most:
    raise TooManyMaps(
      f"After {module} this process has {maps:,} memory maps; more than {most:,} come too near the 65,530 of Linux. "
      "remedy: compile fewer programs in it (share them between its tests), or split it."
    )
  return True
