"""Scores of an environment's answers: by a scorer in worker processes, or by a grader that asks somebody else."""

from __future__ import annotations

import functools
from typing import Any

from sao_jax.chat.messages import text_of
from sao_jax.episode import BadPrompt, Prompt
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_grader import AnswerGrader
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rewards.scalar import check_reward
from sao_jax.rewards.scorers import GOLD_CHECKS, NamedScorer, find_scorer, right_answer, score_answer, score_or_check

Scored = tuple[float, dict[str, float]]  # a reward, and facts for `StepResult.info`


class Grading:
  """Scores answers to prompts whose data has a "question" and the right "answer"; from any event loop.

  Attributes:
    name: of the environment, in failures.
    scorer: a name of sao_jax/rewards/scorers.py, "module:function", or an `AnswerGrader`.
  """

  def __init__(self, name: str, scorer: str | AnswerGrader, *, processes: int = 2, timeout: float = 10.0):
    """`processes` and `timeout` are those of the scorer's `GraderPool`."""
    self.name, self.scorer = name, scorer
    self._processes, self._timeout = processes, timeout

  @functools.cached_property
  def pool(self) -> GraderPool:
    """The processes of a scorer that has a name."""
    return GraderPool(NamedScorer(self.scorer), processes=self._processes, timeout=self._timeout)

  async def check(self, prompt: Prompt) -> None:
    """Looks at the right answer before anybody is asked; where to read it may take long, in a worker process.

    Raises:
      BadPrompt: the scorer could not compare anything with it.
    """
    gold = prompt.data["answer"]
    if not isinstance(self.scorer, str):
      self._check_with(prompt)
    elif self.scorer in GOLD_CHECKS and not await self.pool.grade(self.name, None, gold):
      raise self._unreadable(prompt)

  async def grade(self, answer: str | None, prompt: Prompt) -> Scored:
    """Scores an answer; none earns 0."""
    if answer is None:
      return 0.0, {}
    gold = prompt.data["answer"]
    if isinstance(self.scorer, str):
      return await self.pool.grade(self.name, answer, gold), {}
    reward, facts = await self.scorer.grade(self.name, text_of(prompt.data["question"]), answer, gold)
    return check_reward(reward, self.name), facts

  def demonstrate(self, prompt: Prompt) -> tuple[str, float]:
    """Returns the right answer as it is to be said, and what it earns.

    Raises:
      ConfigError: the scorer has no right answers that could be said.
      BadPrompt: it cannot read this one.
    """
    if not isinstance(self.scorer, str):
      problem = f"{type(self.scorer).__name__} has no right answers to demonstrate."
      raise ConfigError("environment.scorer", problem, "Choose another scorer for SFT.")
    gold, scorer = prompt.data["answer"], find_scorer(self.scorer)
    answer = right_answer(self.scorer, gold, "environment.scorer")
    if not score_or_check(scorer, GOLD_CHECKS.get(self.scorer), None, gold):
      raise self._unreadable(prompt)
    return answer, check_reward(score_answer(scorer, answer, gold), self.name)

  def score_now(self, answer: str | None, prompt: Prompt) -> float:
    """Scores a trusted answer, such as an expert's, in this process; by a scorer that has a name only."""
    if answer is None:
      return 0.0
    if not isinstance(self.scorer, str):
      problem = f"{type(self.scorer).__name__} scores no demonstrations."
      raise ConfigError("environment.scorer", problem, "Choose another scorer for SFT.")
    return check_reward(score_answer(find_scorer(self.scorer), answer, prompt.data["answer"]), self.name)

  def _check_with(self, prompt: Prompt) -> None:
    try:
      self.scorer.check_gold(prompt.data["answer"])
    except ConfigError as problem:
      raise self._unreadable(prompt, f": {problem}") from problem

  def _unreadable(self, prompt: Prompt, more: str = "") -> BadPrompt:
    gold, key = prompt.data["answer"], prompt.key
    name = self.scorer if isinstance(self.scorer, str) else type(self.scorer).__name__
    record = f"Record {key.id} of {key.environment}"
    problem = f"{record} has the right answer {gold!r:.80}, which {name!r} cannot read{more}"
    remedy = "Correct it in the data, name its field, or use another scorer"
    return BadPrompt("environment.answer", problem, remedy, reason="answer_unreadable")


def check_scorer(scorer: Any, field: str = "environment.scorer") -> None:
  """Refuses what is neither the name of a scorer nor a grader, by ConfigError naming `field`."""
  if isinstance(scorer, str):
    find_scorer(scorer, field)
  elif not isinstance(scorer, AnswerGrader) or isinstance(scorer, type):
    problem = f"{scorer!r:.80} is neither the name of a scorer nor a grader."
    raise ConfigError(field, problem, "Use a name, or an LLMJudge or another AnswerGrader.")
