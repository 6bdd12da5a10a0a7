"""Environments of the verifiers package at work: that package runs the episode itself, and we read its outcome.

Its harnesses, tools, runtimes and rewards are as they are; the model behind its requests is an address of ours.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure
from sao_jax.errors import ConfigError
from sao_jax.gateway.harness import HarnessFailure
from sao_jax.gateway.sessions import AgentTask

NO_KEY = "SAO_JAX_HAS_NO_KEY"  # an environment variable that nobody sets: sessions are told apart by their model
SHOWN = 400  # characters of an error that a failure shows
INFRASTRUCTURE = ("SandboxError", "InterceptionError", "TunnelError")  # types of errors by their names


@dataclasses.dataclass(frozen=True)
class Scored:
  """The outcome of an episode: its reward, and the parts of it and metrics by name."""

  reward: float
  info: dict[str, float]


class VerifiersRunner:
  """One environment of verifiers; its episodes run in one event loop, in which it is served from the first one on."""

  def __init__(self, config: Mapping[str, Any], *, name: str, field: str, max_tasks: int):
    """Remembers what to load.

    Args:
      config: the block `env` of verifiers, as its TOML files have it.
      name: of our environment, for failures.
      field: of the configuration, for errors.
      max_tasks: the most tasks that are read.
    """
    self._config, self._name, self._field, self._max_tasks = config, name, field, max_tasks
    self._ready: asyncio.Future[None] | None = None
    self._serving: asyncio.Task[None] | None = None
    self._loop: asyncio.AbstractEventLoop | None = None

  @functools.cached_property
  def env(self) -> Any:
    """The environment.

    Raises:
      ConfigError: the package is missing, or refuses the configuration.
    """
    try:
      import verifiers.v1 as vf
    except ImportError as error:
      problem = f"The package verifiers, from 0.4 on, is not installed ({error})."
      raise ConfigError("environment", problem, "Run: pip install -e '.[serve,verifiers]'") from error
    try:
      return vf.load_environment(vf.resolve_env_config(copy.deepcopy(dict(self._config))))
    except Exception as error:
      problem = f"verifiers cannot load this environment: {type(error).__name__}: {error!s:.{SHOWN}}"
      remedy = 'Write it as the block [env] of verifiers: {"taskset": {"id": "MODULE"}, "agent": {...}}.'
      raise ConfigError(self._field, problem, remedy) from error

  @functools.cached_property
  def tasks(self) -> Sequence[Any]:
    """The environment's tasks in their order; of an endless set, the first ones.

    Raises:
      ConfigError: they cannot be loaded, or there are none.
    """
    env = self.env
    try:
      tasks = list(itertools.islice(env.taskset, self._max_tasks))
    except Exception as error:
      problem = f"The tasks of verifiers cannot be loaded: {type(error).__name__}: {error!s:.{SHOWN}}"
      raise ConfigError(self._field, problem, "Correct the block `taskset`, or install what it needs.") from error
    if not tasks:
      raise ConfigError(self._field, "The set of tasks is empty.", "Correct the block `taskset`.")
    return tasks

  def content(self, index: int) -> str:
    """Writes a task as text, without its place among the others: equal tasks are the same text."""
    data = self.tasks[index].data.model_dump(mode="json", exclude_none=True)
    return json.dumps({name: value for name, value in data.items() if name != "idx"}, sort_keys=True)

  async def play(self, task: AgentTask) -> Scored:
    """Plays one task, in the harness's event loop; the policy answers at the address that `task` has.

    Raises:
      EnvironmentFailure: the episode has no outcome.
    """
    import verifiers.v1 as vf

    await self._serve()
    client = vf.EvalClientConfig(base_url=task.base_url, api_key_var=NO_KEY)
    context = vf.ModelContext(model=task.key, client=client)
    played = await self.env.run_episode(self.tasks[task.data["task"]], context)
    return outcome(played, self._name)

  def close(self) -> None:
    """Takes down what the environment serves."""
    if self._serving is not None and self._loop.is_running():
      self._loop.call_soon_threadsafe(self._serving.cancel)

  async def _serve(self) -> None:
    """Serves the environment from now on; the first episode begins it, the others wait for that."""
    if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
      self._loop = asyncio.get_running_loop()
      self._ready = self._loop.create_future()
      self._serving = asyncio.create_task(self._keep_serving(self._ready), name=f"verifiers of {self._name}")
    await asyncio.shield(self._ready)

  async def _keep_serving(self, ready: asyncio.Future[None]) -> None:
    # Entered and left by the same task, as servers of tools want it.
    try:
      async with self.env.serving():
        ready.set_result(None)
        await asyncio.Event().wait()
    except Exception as error:
      if ready.done():
        raise
      problem = f"verifiers cannot serve the environment: {type(error).__name__}: {error!s:.{SHOWN}}"
      failure = InfrastructureFailure(self._name, problem)
      failure.__cause__ = error
      ready.set_exception(failure)


def outcome(episode: Any, name: str) -> Scored:
  """Reads the outcome of an episode: the mean reward of the seats that are trained, and their numbers by name.

  Raises:
    EnvironmentFailure: an error ended it, or a reward is missing; never is that a reward of 0.
  """
  if not episode.ok:
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    raise failure_of(errors[-1] if errors else None, name)

  # A reward that was not computed is None.
  trained = [trace for trace in episode.traces if trace.agent.trainable]
  if not trained:
    raise HarnessFailure(name, "no seat of the episode is trained")
  for trace in trained:
    missing = [each for each, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
      problem = f"there is no reward {missing[0]!r}" if missing else "its task has no reward"
      raise GraderFailure(name, f"{problem}, after {trace.stop_condition}")

  # The numbers of several seats are their means.
  numbers: dict[str, list[float]] = {}
  for trace in trained:
    rewards = {f"reward_{each}": reward.score for each, reward in trace.rewards.items()}
    metrics = {each: value for each, value in trace.metrics.items() if value is not None}
    for each, value in (metrics | rewards | {"truncated": float(trace.is_truncated)}).items():
      numbers.setdefault(each, []).append(float(value))
  info = {each: sum(values) / len(values) for each, values in numbers.items()}
  return Scored(sum(trace.reward for trace in trained) / len(trained), info | {"traces": float(len(trained))})


def failure_of(error: Any, name: str) -> EnvironmentFailure:
  """Returns the failure that an error of verifiers is."""
  if error is None:
    return HarnessFailure(name, "verifiers gave the episode up, without an error")
  problem = f"{error.type}: {error.message!s:.{SHOWN}}"
  if error.type == "TaskError" and "scoring" in error.message:
    return GraderFailure(name, problem)
  refused = error.type == "ProviderError" and 400 <= (error.status_code or 500) < 500  # by us, as when it was cut
  if error.type in INFRASTRUCTURE or (error.type == "ProviderError" and not refused):
    return InfrastructureFailure(name, problem)
  return HarnessFailure(name, problem)
