"""Episodes as token ids, cut into turns: how an environment that knows its task reads one again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int


def turns_of(
  token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]
) -> Iterator[tuple[Int[np.ndarray, "n"], Int[np.ndarray, "m"]]]:
  """Yields what was shown before each action, and the action.

  >>> [(shown.tolist(), action.tolist()) for shown, action in turns_of([5, 6, 8, 9, 7], [0, 1, 0, 0, 1])]
  [([5], [6]), ([8, 9], [7])]
  """
  edges = np.flatnonzero(np.diff(np.asarray(action_mask, dtype=np.int8))) + 1
  parts = np.split(np.asarray(token_ids), edges)
  yield from zip(parts[::2], parts[1::2])
