"""Episodes outside the asynchronous loop, on fixed weights: evaluation, the audit and `sample` need a few."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from absl import logging

from sao_jax.config import RunConfig
from sao_jax.data.prompts import check_prompts_of
from sao_jax.episode import BadPrompt, EnvironmentFailure, NotPosed, Prompt, Trajectory, only_looked_at
from sao_jax.errors import ConfigError
from sao_jax.evaluation.event_loop import run_in_background
from sao_jax.interrupt import StopSignal
from sao_jax.rollout.calls import call_environment, failures_of, make_environment
from sao_jax.rollout.entries import Rollout
from sao_jax.rollout.loop_clock import LoopClock
from sao_jax.rollout.outages import Outages
from sao_jax.rollout.outcomes import BadEvidence, EnvironmentDown, PromptEmpty, PromptTooLong, RolloutSilent
from sao_jax.rollout.prompt_stream import check_prompt
from sao_jax.rollout.run_episode import EpisodeLimits, check_stop_ids
from sao_jax.rollout.runner import EpisodeRunner
from sao_jax.rollout.watchdog import Activity, describe_tasks
from sao_jax.sampler.service import SamplerService
from sao_jax.sampler.state import MAX_STOP_IDS

CHECKED_PROMPTS = 16

T = TypeVar("T")
Outcome = Trajectory | Exception  # of an episode: what it left, or why there is none


def run_episodes(
  config: RunConfig,
  service: SamplerService,
  prompts: Iterable[Prompt],
  *,
  temperature: float,
  first_rollout_id: int = 0,
  interrupt: StopSignal | None = None,
) -> tuple[list[Trajectory], list[Exception]]:
  """Runs one episode per prompt, see `run_rollouts`.

  Args:
    config: the run's configuration.
    service: a started sampler.
    prompts: the tasks.
    temperature: sampling temperature; 0 chooses the most probable token.
    first_rollout_id: rollout ids count from here; with the sampler's seed they determine all random keys.
    interrupt: ends all episodes when the process is asked to stop.

  Returns:
    The trajectories in the order of the prompts, and what went wrong with the others.

  Raises:
    Interrupted, RolloutSilent: as `run_rollouts`.

  Example:
    source = config.environment.prompts(config.environment.tokenizer(), "heldout", 0)
    with make_service(config, make_publisher(learner)(params), seed=0) as service:
      trajectories, failures = run_episodes(config, service, [source[0]], temperature=1.0)
  """
  rollouts = [Rollout(number, prompt) for number, prompt in enumerate(prompts, first_rollout_id)]
  results = run_rollouts(config, service, rollouts, temperature=temperature, interrupt=interrupt)
  trajectories = [result for result in results if isinstance(result, Trajectory)]
  return trajectories, [result for result in results if not isinstance(result, Trajectory)]


def run_rollouts(
  config: RunConfig,
  service: SamplerService,
  rollouts: Sequence[Rollout],
  *,
  temperature: float,
  interrupt: StopSignal | None = None,
  keep: Callable[[Rollout, Outcome], T] = lambda rollout, outcome: outcome,
) -> list[T]:
  """Runs episodes, as many at once as there are slots.

  Args:
    config: the run's configuration.
    service: a started sampler.
    rollouts: the tasks; with the sampler's seed their ids determine all random keys.
    temperature: sampling temperature; 0 chooses the most probable token.
    interrupt: ends all episodes when the process is asked to stop.
    keep: called with each episode's outcome when it ends, on the event loop; what it returns is kept.

  Returns:
    What is kept, in the order of the rollouts, by default the outcomes: trajectories, failures of environments that
    outlasted `rollout.environment_retries`, an outage that outlasted `rollout.outage_seconds`, evidence that cannot be
    trusted, or a prompt that nobody can attempt (a `BadPrompt`). All but trajectories are no outcome of the prompt,
    which is not the same as reward 0.

  Raises:
    Interrupted: the process was asked to stop.
    RolloutSilent: nothing has happened for `training.watchdog_seconds`.
  """
  activity = Activity(lambda: service.progress)

  def look(event_loop: asyncio.AbstractEventLoop) -> None:
    if activity.silence > config.training.watchdog_seconds:
      tasks = describe_tasks(asyncio.all_tasks(event_loop))
      raise RolloutSilent(f"nothing has happened for {activity.silence:.0f} s in {len(rollouts)} episodes\n{tasks}")

  episodes = _run_all(config, service, rollouts, temperature, activity, keep)
  return run_in_background(episodes, interrupt=interrupt, look=look)


async def _run_all(
  config: RunConfig,
  service: SamplerService,
  rollouts: Sequence[Rollout],
  temperature: float,
  activity: Activity,
  keep: Callable[[Rollout, Outcome], T],
) -> list[T]:
  """Runs all episodes in one event loop; returns what is kept of each, see `run_rollouts`."""
  tokenizer = config.environment.tokenizer()
  tasks: dict[asyncio.Task, Rollout] = {}
  down: dict[str, EnvironmentDown] = {}  # environments that were given up

  def give_up(error: EnvironmentDown) -> None:
    for task, rollout in tasks.items() if error.environment not in down else ():
      if rollout.prompt.key.environment == error.environment and task is not asyncio.current_task():
        task.cancel()
    down[error.environment] = error

  runner = EpisodeRunner(
    lambda: config.environment.make(tokenizer),
    service,
    EpisodeLimits.of(config.rollout, context_length=config.sampler.context_length, vocab_size=config.model.vocab_size),
    temperature=temperature,
    timeout=config.rollout.environment_timeout,
    retries=config.rollout.environment_retries,
    outages=Outages(config.rollout.outage_seconds, stop=give_up),
    on_activity=activity.note,
  )

  # As many episodes at a time as the sampler has slots; a failure is the result of its own episode alone.
  free_slots = asyncio.Semaphore(config.sampler.num_slots)

  async def run_one(rollout: Rollout) -> T:
    return keep(rollout, await outcome_of(rollout))

  async def outcome_of(rollout: Rollout) -> Outcome:
    try:
      async with free_slots:
        return await runner.run(rollout)
    except (EnvironmentFailure, BadEvidence, BadPrompt) as failure:
      logging.error("the episode of prompt %s has no outcome: %s", tuple(rollout.prompt.key), failure)
      return failure
    except asyncio.CancelledError:
      if rollout.prompt.key.environment not in down:
        raise
      return down[rollout.prompt.key.environment]

  # Results come in the order of the prompts, whichever episode ends first.
  for rollout in rollouts:
    tasks[asyncio.create_task(run_one(rollout), name=f"rollout {rollout.rollout_id}")] = rollout
  return await asyncio.gather(*tasks)


def read_prompts(source: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[BadPrompt]]:
  """Reads the first items of a source, at most `count`; returns the prompts, and the errors of items that are none."""
  prompts, problems = [], []
  for index in itertools.islice(range(len(source)), count):
    try:
      prompts.append(source[index])
    except BadPrompt as problem:
      logging.warning("an item is skipped: %s; %s.", problem.problem, problem.remedy)
      problems.append(problem)
  return prompts, problems


def check_prompts(config: RunConfig) -> None:
  """Refuses, before any work, an environment none of whose prompts can be attempted; looks at the first few.

  One that is too long, empty or damaged is skipped by the run, and said here. Data that no checkpoint could hold is the
  same in all prompts as a rule, so one of those is enough.

  Raises:
    BadPrompt: names what is wrong with the prompts, and the remedy.
    ConfigError: the environment's `stop_ids` are none.
  """
  tokenizer = config.environment.tokenizer()

  async def read(prompt: Prompt, clock: LoopClock) -> int:
    """Returns the length of a prompt, as a fresh environment poses it; refuses impossible stop ids."""
    name, seconds = prompt.key.environment, config.rollout.environment_timeout
    environment = make_environment(lambda: config.environment.make(tokenizer), name, seconds, clock)
    close = lambda: call_environment(lambda: environment.close(), name, "close", seconds, clock)
    try:
      ids = await call_environment(lambda: environment.reset(prompt.copy()), name, "reset", seconds, clock)
      with failures_of(name, "reading the prompt"):
        length = len(ids)
      try:
        with failures_of(name, "reading stop_ids"):
          check_stop_ids(environment.stop_ids, environment=name, vocab_size=config.model.vocab_size)
      except EnvironmentFailure as failure:
        remedy = f"Give it at most {MAX_STOP_IDS} ids, below model.vocab_size."
        raise ConfigError("environment", failure.problem, remedy) from failure
    except BaseException:
      # What failed first is what there is to mend.
      with contextlib.suppress(EnvironmentFailure):
        await close()
      raise
    await close()
    return length

  async def check(split: str, seed: int) -> None:
    clock = LoopClock().start()
    source = config.environment.prompts(tokenizer, split, seed)
    check_prompts_of(source)
    only_looked_at.set(True)
    prompts, bad = read_prompts(source, CHECKED_PROMPTS)
    looked_at = len(prompts) + len(bad)
    for prompt in prompts:
      check_prompt(prompt)
      name = str(tuple(prompt.key))
      try:
        length = await read(prompt, clock)
        if not length:
          raise PromptEmpty(prompt.key.environment, name)
        if length >= config.sampler.context_length:
          raise PromptTooLong(length, config.sampler.context_length, name)
      except BadPrompt as problem:
        bad.append(problem)
      except NotPosed:  # by agents of their own, who are not to be bothered for this
        continue
      except EnvironmentFailure as failure:  # the run itself retries, counts and in the end reports failures
        logging.warning("prompt %s could not be checked: %s", name, failure)

    if bad and len(bad) == looked_at:
      raise bad[0]
    if bad:
      said = "%d of the first %d %s prompts will be skipped, one because %s; %s."
      logging.warning(said, len(bad), looked_at, split, bad[0].problem, bad[0].remedy)

  run_in_background(check("train", config.training.seed))
  run_in_background(check("heldout", config.evaluation.seed))
