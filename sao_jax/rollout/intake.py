"""Where rollouts come from: prompts in order, numbered; after a resume first the ones that were unfinished."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Protocol

from sao_jax.episode import Prompt, PromptKey
from sao_jax.rollout.admission import AdmissionControl


class PromptStream(Protocol):
  """Prompts in order; its state is JSON."""

  def __next__(self) -> Prompt: ...
  def get_state(self) -> Any: ...
  def set_state(self, state: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Rollout:
  """A prompt with its number in the run; the number and the run's seed determine all random keys."""

  rollout_id: int
  prompt: Prompt


class RolloutIntake:
  """Hands out rollouts while admission has capacity, and remembers which are unfinished.

  Not thread-safe by itself: hold the lock of the admission control.

  Attributes:
    exhausted: whether the prompts have ended.
  """

  def __init__(self, prompts: PromptStream, admission: AdmissionControl):
    self.exhausted = False
    self._prompts, self._admission = prompts, admission
    self._next_rollout_id = 0
    self._unfinished: dict[int, Rollout] = {}
    self._again: collections.deque[Rollout] = collections.deque()

  def next(self) -> Rollout | None:
    """The next rollout, which from now on is in flight; None when there is no capacity or no prompt."""
    if self._again:  # counted as in flight already
      return self._again.popleft()
    if self.exhausted or self._admission.capacity < 1:
      return None
    try:
      prompt = next(self._prompts)
    except StopIteration:
      self.exhausted = True
      return None
    self._admission.submit()
    rollout = Rollout(self._next_rollout_id, prompt)
    self._next_rollout_id += 1
    self._unfinished[rollout.rollout_id] = rollout
    return rollout

  def finished(self, rollout: Rollout) -> None:
    """A rollout was buffered or has its outcome; an aborted one is not finished."""
    del self._unfinished[rollout.rollout_id]

  def state_dict(self) -> dict[str, Any]:
    """JSON: unfinished rollouts with their prompts, the next number, the state of the prompt iterator."""
    unfinished = sorted(self._unfinished.values(), key=lambda rollout: rollout.rollout_id)
    return {
      "next_rollout_id": self._next_rollout_id,
      "unfinished": [[rollout.rollout_id, list(rollout.prompt.key), rollout.prompt.data] for rollout in unfinished],
      "prompts": self._prompts.get_state(),
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Goes on from a saved state: unfinished rollouts start again first, under their old numbers."""
    self._next_rollout_id = state["next_rollout_id"]
    self._again.extend(Rollout(number, Prompt(PromptKey(*key), data)) for number, key, data in state["unfinished"])
    self._unfinished = {rollout.rollout_id: rollout for rollout in self._again}
    self._prompts.set_state(state["prompts"])
