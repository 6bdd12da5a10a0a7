"""The choice of how many steps a dispatch takes."""

from __future__ import annotations

import numpy as np

# Cost of starting a dispatch, in decode steps.
_DISPATCH_OVERHEAD = 1.0


def best_num_steps(steps_left: np.ndarray, max_steps: int, overhead: float = _DISPATCH_OVERHEAD) -> int:
  """Returns the number of steps ≤ max_steps with the most tokens per time, given how long each turn may still run.

  A long dispatch leaves slots idle whose turns end early in it; short ones pay the overhead (in steps) more often.

  >>> best_num_steps(np.array([8, 8, 8]), max_steps=8), best_num_steps(np.array([2, 2, 8]), max_steps=8)
  (8, 2)
  """
  steps = np.arange(1, max_steps + 1, dtype=np.int32)
  useful = np.minimum(steps_left[:, None], steps).sum(axis=0)
  rate = useful / (steps + overhead)
  return int(max_steps - np.argmax(rate[::-1]))
