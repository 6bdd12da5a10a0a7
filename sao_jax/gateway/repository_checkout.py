"""The repository of a `RepositoryTask` for a harness that is a plain function: commands in a sandbox, a verdict."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from sao_jax.environments.repository_record import RepositoryRecord
from sao_jax.environments.repository_task import AGENT, RepositoryTask
from sao_jax.environments.repository_work import commit_base, place_files, read_patch
from sao_jax.episode import Prompt, PromptKey
from sao_jax.sandbox.contract import CommandResult, Sandbox


class Checkout:
  """A work folder with the base commit; belongs to the thread that has it."""

  def __init__(
    self,
    tasks: RepositoryTask,
    record: RepositoryRecord,
    archive: bytes | None,
    sandbox: Sandbox,
    runner: asyncio.Runner,
  ):
    """Takes over a sandbox; `checked_out` makes one."""
    self._tasks, self._record, self._archive = tasks, record, archive
    self._sandbox, self._runner = sandbox, runner
    runner.run(place_files(sandbox, tasks.name, archive, tasks.image_folder))
    self._base = runner.run(commit_base(sandbox, tasks.name))

  def run(self, command: str, timeout: float | None = None) -> CommandResult:
    """Runs a command of the agent's in a shell, for at most `timeout` seconds, by default the tasks' `call_timeout`."""
    seconds = self._tasks.call_timeout if timeout is None else timeout
    variables = AGENT | {"HOME": "/tmp", "PYTHONPATH": ":".join(self._tasks.packages), "PAGER": "cat"}
    return self._runner.run(self._sandbox.run(["bash", "-c", command], timeout=seconds, environment=variables))

  def judge(self) -> float:
    """Returns the reward of the work folder as it is: 1.0 if all hidden tests pass, else 0.0.

    Raises:
      GraderFailure: the judge could not work.
      InfrastructureFailure: a sandbox is gone.
    """
    patch = self._runner.run(read_patch(self._sandbox, self._base, self._tasks.test_timeout))
    if not patch:
      return 0.0
    return float(self._runner.run(self._tasks.judge(self._record, self._archive, patch)).resolved)


@contextlib.contextmanager
def checked_out(tasks: RepositoryTask, data: Mapping[str, Any]) -> Iterator[Checkout]:
  """Opens the repository of one task.

  Args:
    tasks: the settings whose prompts are the agent's tasks.
    data: `AgentTask.data`.

  Raises:
    BadPrompt: the record cannot be used.
    InfrastructureFailure: there is no sandbox.
  """
  record = tasks.record(Prompt(PromptKey(tasks.name, 0, 0), dict(data)))
  archive = tasks.read_files(record)
  with asyncio.Runner() as runner:
    sandbox = runner.run(tasks.start(record))
    try:
      yield Checkout(tasks, record, archive, sandbox, runner)
    finally:
      runner.run(tasks.stop(sandbox))
