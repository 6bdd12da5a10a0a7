"""Synchronous environments in worker processes: a call that hangs is killed, and what computes leaves the loop alone.

Every episode has a process, which takes the next episode once this one is closed. Prompts and actions go to it pickled;
what comes back, from a process that has read a policy's text, is JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import EnvironmentSpec, StepResult, check_step_result, check_token_ids
from sao_jax.environments.synchronous import Places, SynchronousEnvironment, ThreadedEpisode, check_workers
from sao_jax.environments.wrappers import Wrapper
from sao_jax.episode import BadPrompt, EnvironmentFailure, GraderFailure, InfrastructureFailure, Prompt, Status
from sao_jax.rewards.grader_pool import pickle_request, pickle_setup
from sao_jax.rewards.queueing import waiting
from sao_jax.rewards.scalar import check_reward
from sao_jax.rewards.worker_process import WorkerLost, WorkerProcess

MAX_ANSWER = 2**28  # bytes
MAX_ID = 2**31  # the exact bound is checked where the vocabulary is known


@dataclasses.dataclass(frozen=True)
class InProcesses(Wrapper):
  """Settings of synchronous episodes in processes: `inner` makes `SynchronousEnvironment`s, in the workers.

  `inner` is an instance of a class in a module that can be imported: the workers get a copy. A worker never imports
  jax unless its module does. What it prints is discarded.
  """

  workers: int = (
    0  # processes; episodes beyond that wait for their turn, which no time-out counts; 0: as many as needed
  )

  def __post_init__(self):
    check_workers(self.workers)

  @functools.cached_property
  def processes(self) -> _Processes:
    """The worker processes of these settings."""
    return _Processes(self.inner)

  @functools.cached_property
  def _places(self) -> Places:
    return Places(self.name, self.workers)

  def make(self, tokenizer: Tokenizer) -> ProcessEpisode:
    processes = self.processes
    return ProcessEpisode(self.name, self._places, lambda: _Remote(self.name, processes))

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    self.make(tokenizer)  # refuses settings that cannot be sent to a process now, not at the first episode
    return self.inner.prompts(tokenizer, split, seed)


class ProcessEpisode(ThreadedEpisode):
  """One episode in a process, which a thread waits for."""

  async def _begin(self) -> None:
    with waiting():  # a process that starts imports its modules
      await super()._begin()

  def _give_up(self, what: str, future: Any) -> None:
    if self._inner is not None:
      self._inner.kill()
    super()._give_up(what, future)


class _Processes:
  """Workers without an episode; thread-safe."""

  def __init__(self, settings: EnvironmentSpec):
    host = _Host(dataclasses.replace(settings))  # a copy without what it may have cached
    self._setup = pickle_setup(host, None, field="environment.inner", function=settings)
    self._idle: list[WorkerProcess] = []
    self._lock = threading.Lock()

  def take(self) -> WorkerProcess:
    """Returns a worker that has no episode: an idle one, or a new one."""
    while True:
      with self._lock:
        worker = self._idle.pop() if self._idle else None
      if worker is None:
        break
      if worker.poll() is None:
        return worker
      worker.drop()  # it was killed from outside

    worker = WorkerProcess(MAX_ANSWER)
    try:
      worker.set_up(self._setup)
    except BaseException:
      worker.drop()
      raise
    return worker

  def give_back(self, worker: WorkerProcess) -> None:
    """Keeps a worker whose episode is closed for the next one."""
    with self._lock:
      self._idle.append(worker)


class _Remote(SynchronousEnvironment):
  """An episode in a worker process, as its thread sees it."""

  stop_ids = ()

  def __init__(self, name: str, processes: _Processes):
    self._name, self._processes = name, processes
    try:
      self._worker: WorkerProcess | None = processes.take()
    except (WorkerLost, OSError) as error:
      raise InfrastructureFailure(name, f"its worker process {error}") from error

  def kill(self) -> None:
    """Ends the process in the middle of a call; from any thread."""
    worker = self._worker
    if worker is not None:
      worker.kill()

  def reset(self, prompt: Prompt) -> list[int]:
    answer = self._ask("reset", prompt)
    self.stop_ids = tuple(answer["stop_ids"])
    return answer["prompt_ids"]

  def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    return StepResult(**self._ask("step", action_ids))

  def on_truncated(self, status: Status) -> Any:
    return self._ask("on_truncated", status)

  def close(self) -> None:
    if self._worker is None:
      return
    try:
      self._ask("close")
    except BaseException:
      self._drop()
      raise
    worker, self._worker = self._worker, None
    self._processes.give_back(worker)

  def _ask(self, method: str, *arguments: Any) -> Any:
    """Makes a call in the process, which is ended unless it answers."""
    if self._worker is None:
      raise InfrastructureFailure(self._name, f"its worker process has ended before {method}")
    try:
      answer, problem = self._worker.exchange(pickle_request(method, *arguments), None)
    except (WorkerLost, OSError) as error:
      self._drop()
      raise InfrastructureFailure(self._name, f"its worker process {error}, in {method}") from error
    if problem is not None:
      raise RuntimeError(problem)
    if "bad_prompt" in answer:
      *sentence, reason = answer["bad_prompt"]
      raise BadPrompt(*sentence, reason=reason)
    if "failure" in answer:
      kind, text, retryable = answer["failure"]
      raise FAILURES[kind](self._name, text, retryable=retryable)
    return answer["value"]

  def _drop(self) -> None:
    worker, self._worker = self._worker, None
    if worker is not None:
      worker.drop()


FAILURES = {kind.__name__: kind for kind in (GraderFailure, InfrastructureFailure, EnvironmentFailure)}


class _Host:
  """Plays one episode after the other in a worker process; its answers are JSON."""

  def __init__(self, settings: EnvironmentSpec):
    self._settings, self._environment = settings, None

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._tokenizer = self._settings.tokenizer()  # now: no time-out of a call is for that

  def __call__(self, method: str, *arguments: Any) -> dict[str, Any]:
    try:
      return {"value": getattr(self, f"_{method}")(*arguments)}
    except EnvironmentFailure as failure:
      kind = next(name for name, kind in FAILURES.items() if isinstance(failure, kind))
      return {"failure": [kind, failure.problem, failure.retryable]}
    except BadPrompt as problem:
      return {"bad_prompt": [problem.field, problem.problem, problem.remedy, problem.reason]}
    except OSError as error:
      return {"failure": ["InfrastructureFailure", f"{method} raised {type(error).__name__}: {error}", True]}

  def _reset(self, prompt: Prompt) -> dict[str, Any]:
    self._environment = self._settings.make(self._tokenizer)
    ids = self._environment.reset(prompt)
    ids = check_token_ids(ids, environment=self._settings.name, vocab_size=MAX_ID, what="the prompt")
    return {"prompt_ids": ids.tolist(), "stop_ids": [int(token) for token in self._environment.stop_ids]}

  def _step(self, action_ids: Int[np.ndarray, "n"]) -> dict[str, Any]:
    result = self._environment.step(action_ids)
    result = check_step_result(result, environment=self._settings.name, vocab_size=MAX_ID)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return fields | {"observation": result.observation.tolist(), "info": _numbers(result.info)}

  def _on_truncated(self, status: Status) -> float:
    reward = getattr(self._environment, "on_truncated", lambda status: 0.0)(status)
    return check_reward(reward, self._settings.name)

  def _close(self) -> None:
    environment, self._environment = self._environment, None
    getattr(environment, "close", lambda: None)()


def _numbers(info: dict[str, Any]) -> dict[str, Any]:
  return {name: value.item() if isinstance(value, np.generic) else value for name, value in info.items()}
