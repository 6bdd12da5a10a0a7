"""Graders that ask somebody else for the reward of an answer: a model, a sandbox. They wait, and do not compute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class AnswerGrader(Protocol):
  """Settings of such a grader: a frozen dataclass that can be pickled, to stand where a scorer is named."""

  def check(self) -> None:
    """Refuses, by ConfigError and before work starts, a machine where it cannot grade anything."""
    ...

  def check_gold(self, gold: Any, field: str = "gold") -> None:
    """Looks at the right answer before anybody is asked; raises a ConfigError naming `field` if it is of no use."""
    ...

  async def grade(self, environment: str, question: str, said: str, gold: Any) -> tuple[float, dict[str, float]]:
    """Grades one answer; returns the reward, and facts for `StepResult.info`.

    Args:
      environment: named by failures.
      question: as text.
      said: what the policy answered: any text.
      gold: the right answer in the data.

    Raises:
      GraderFailure: there is no reward, which is never 0.
      InfrastructureFailure: whoever is asked is down; worth another try.
    """
    ...


class PerEventLoop(Generic[T]):
  """One object for each event loop that asks: connections, semaphores and pools of sandboxes belong to one.

  >>> numbers = PerEventLoop(list)
  >>> async def same():
  ...   return numbers.get() is numbers.get()
  >>> asyncio.run(same())
  True
  """

  def __init__(self, make: Callable[[], T]):
    self._make = make
    self._made: dict[asyncio.AbstractEventLoop, T] = {}

  def get(self) -> T:
    """Returns that of the running event loop, made when it is first asked for."""
    event_loop = asyncio.get_running_loop()
    if event_loop not in self._made:
      # Those of event loops that have ended go, since nobody can ask for them any more.
      for ended in [each for each in list(self._made) if each.is_closed()]:
        self._made.pop(ended, None)
      self._made[event_loop] = self._make()
    return self._made[event_loop]
