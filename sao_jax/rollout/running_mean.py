"""Running means of returns, the baselines of REINFORCE without a critic and without groups.

A window holds the returns that were trained on last, of each prompt or of all together. A batch gets its baselines
before its own returns enter, so that no trajectory is compared with itself. A prompt that was never trained on has the
baseline 0.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any, Literal

from sao_jax.episode import PromptKey

ALL = ("", 0)  # the key of the one window of scope "global"


class RunningMeans:
  """Windows of returns; each process of several has those of the trajectories that it brought.

  >>> means = RunningMeans(window=2, scope="prompt")
  >>> for value in (0.0, 1.0, 3.0):
  ...   means.add([(PromptKey("toy", 7, 0), value)])
  >>> means.baseline(PromptKey("toy", 7, 1)), means.baseline(PromptKey("toy", 8, 0))
  (2.0, 0.0)
  """

  def __init__(self, window: int, scope: Literal["prompt", "global"]):
    """`window`: returns of each mean, the newest ones."""
    self._size, self._scope = window, scope
    self._windows: dict[tuple[str, int], collections.deque[float]] = {}

  def baseline(self, key: PromptKey) -> float:
    """Returns the mean of the window that a prompt belongs to; 0 if it is empty."""
    window = self._windows.get(self._of(key))
    return sum(window) / len(window) if window else 0.0

  def add(self, returns: Iterable[tuple[PromptKey, float]]) -> None:
    """Enters the returns of a batch that has been trained on, in order."""
    for key, value in returns:
      self._windows.setdefault(self._of(key), collections.deque(maxlen=self._size)).append(value)

  def state_dict(self) -> list[Any]:
    """Returns all windows as JSON values."""
    return [[*key, list(window)] for key, window in self._windows.items()]

  def load_state_dict(self, state: Iterable[Any]) -> None:
    """Restores windows; of several with one key, from several processes, the newest returns of the last one stay."""
    self._windows.clear()
    for environment, number, values in state:
      window = self._windows.setdefault((environment, number), collections.deque(maxlen=self._size))
      window.extend(values)

  def _of(self, key: PromptKey) -> tuple[str, int]:
    return ALL if self._scope == "global" else (key.environment, key.id)
