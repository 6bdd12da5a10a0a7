"""Prompts that nobody can attempt: each is skipped and said once; nothing but such prompts is an error."""

from __future__ import annotations

import logging

from sao_jax.episode import BadPrompt, PromptKey
from sao_jax.rollout.outcomes import NothingButBadPrompts

log = logging.getLogger(__name__)

IN_A_ROW = 256  # so many, with none in between that could be attempted, are no accident
SAID = 20  # so many are named in the log; the counters have all of them


class BadPrompts:
  """Skipped prompts: of a run's rollouts, or of its demonstrations.

  Attributes:
    count: all of them.
  """

  def __init__(self) -> None:
    self.count, self._in_a_row = 0, 0
    self._said: set[tuple[str, int] | str] = set()

  def skip(self, problem: BadPrompt, key: PromptKey | None = None) -> None:
    """Takes note of one, by its key if that is known.

    Raises:
      NothingButBadPrompts: it is one of very many in a row.
    """
    self.count += 1
    self._in_a_row += 1

    # A prompt comes again in every epoch, and is said only once.
    name = problem.problem if key is None else (key.environment, key.id)
    if len(self._said) < SAID and name not in self._said:
      self._said.add(name)
      last = " Further ones are only counted." if len(self._said) == SAID else ""
      log.warning("a prompt is skipped: %s; %s.%s", problem.problem, problem.remedy, last)
    if self._in_a_row >= IN_A_ROW:
      raise NothingButBadPrompts(self._in_a_row, problem)

  def good(self) -> None:
    """Takes note of a prompt that can be attempted."""
    self._in_a_row = 0
