"""Unit tests as a reward: an answer's code against hidden tests, in a sandbox."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Literal

from sao_jax.episode import GraderFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_grader import PerEventLoop
from sao_jax.sandbox.bubblewrap import LocalSandbox
from sao_jax.sandbox.case_runner import SOLUTION
from sao_jax.sandbox.contract import DEFAULT_LIMITS, SandboxLimits
from sao_jax.sandbox.program_cases import read_cases
from sao_jax.sandbox.sandbox_pool import SandboxPool
from sao_jax.sandbox.verdict import graded_run
from sao_jax.settings import Reopened

FENCE = re.compile(r"^```[ \t]*([^\n`]*?)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
LANGUAGES = ("", "python", "python3", "py")
GRACE = 2.0  # seconds for the tests themselves, beyond those of the program under test


@dataclasses.dataclass(frozen=True)
class UnitTests(Reopened):
  """Settings of an `AnswerGrader`: the right answer in the data are the tests of a problem, see `program_cases`.

  >>> tests = UnitTests(reward="fraction")
  """

  reward: Literal["all", "fraction"] = "all"  # 1 if all cases pass, else 0; or the share of them that passes
  case_timeout: float = 6.0  # seconds for one call, or one run of the program
  timeout: float = 24.0  # for all of them; what is left then has failed. Less than rollout.environment_timeout
  max_cases: int = 64  # of a problem: the first ones; others are counted as left out
  sandboxes: int = 8  # at a time, in each event loop
  warm: int = 2  # sandboxes that wait, started already
  limits: SandboxLimits = DEFAULT_LIMITS  # of each; whoever oversteps one earns 0

  def __post_init__(self):
    checks = (
      ("reward", self.reward in ("all", "fraction"), '"all" or "fraction"'),
      ("case_timeout", 0.0 < self.case_timeout < math.inf, "seconds above 0"),
      ("timeout", 0.0 < self.timeout < math.inf, "seconds above 0"),
      ("max_cases", self.max_cases >= 1, "at least 1"),
      ("sandboxes", self.sandboxes >= 1, "at least 1"),
      ("warm", 0 <= self.warm <= self.sandboxes, "0 to sandboxes"),
    )
    for name, valid, wanted in checks:
      if not valid:
        raise ConfigError(f"unit_tests.{name}", f"{getattr(self, name)!r} cannot work.", f"Use {wanted}.")

  @functools.cached_property
  def _pools(self) -> PerEventLoop[SandboxPool]:
    start = functools.partial(LocalSandbox.start, self.limits)
    return PerEventLoop(lambda: SandboxPool(start, size=self.sandboxes, warm=self.warm))

  def check(self) -> None:
    """Refuses, before work starts, a machine where no sandbox can be made."""
    LocalSandbox.check()

  def check_gold(self, gold: Any, field: str = "gold") -> None:
    """Refuses what holds no tests, by ConfigError naming `field`."""
    read_cases(gold, field)

  async def grade(self, environment: str, question: str, said: str, gold: Any) -> tuple[float, dict[str, float]]:
    """Runs an answer's code against the tests; see `AnswerGrader`. Whatever the code does, it earns at least 0.

    Raises:
      GraderFailure: a test itself cannot be run.
      InfrastructureFailure: the sandbox is gone.
    """
    all_cases = read_cases(gold)
    cases = all_cases.first(self.max_cases)
    facts = {"tests": float(len(cases)), "tests_left_out": float(len(all_cases) - len(cases)), "tests_passed": 0.0}
    code = code_of(said)
    if not code.strip():
      return 0.0, facts

    # The cases have the times of the program under test; the sandbox ends what hangs all the same.
    pool = self._pools.get()
    async with pool.sandbox() as sandbox:
      await sandbox.write_file(SOLUTION, code.encode("utf-8", "replace"))
      tests = cases.program(self.case_timeout, self.timeout)
      try:
        verdict = await graded_run(sandbox, tests, timeout=self.timeout + GRACE)
      except ConfigError as problem:  # a case that parses by itself, and not within a function
        raise GraderFailure(environment, str(problem)) from problem
    facts["tests_seconds"] = verdict.result.seconds
    if not verdict.passed:
      return 0.0, facts  # it has overstepped a limit, or ended the tests

    # The line before the word that proves the end; only the tests can write there.
    passed, _, problem = verdict.result.stdout.split(b"\n")[-4].decode("utf-8", "replace").partition(" ")
    if problem:
      raise GraderFailure(environment, f"a hidden test cannot be run: {problem}")
    facts["tests_passed"] = float(passed)
    share = float(passed) / len(cases)
    return float(share == 1.0) if self.reward == "all" else share, facts

  async def close(self) -> None:
    """Ends the sandboxes of this event loop that wait; a process that ends need not."""
    await self._pools.get().close()


def code_of(said: str) -> str:
  """Returns the last fenced block of Python, or without any the whole text.

  >>> code_of("So:\\n```python\\nx = 1\\n```\\nDone.")
  'x = 1\\n'
  """
  fenced = [code for language, code in FENCE.findall(said) if language.lower() in LANGUAGES]
  return fenced[-1] if fenced else said
