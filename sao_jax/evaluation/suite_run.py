"""Runs the episodes of a benchmark that are not done yet; each is written down when it ends.

The random keys of an episode depend on its problem, its run and `evaluation.seed` alone. So what was killed and gone on
with, by however many processes, has the result of what ran in one go.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from sao_jax.config import RunConfig
from sao_jax.configuration import config_tree
from sao_jax.configuration.paths import located
from sao_jax.environments.episode_texts import KeepTexts
from sao_jax.episode import BadPrompt, Prompt
from sao_jax.evaluation.fixed_policy import Outcome, run_rollouts
from sao_jax.evaluation.heldout import follow
from sao_jax.evaluation.suite import Suite
from sao_jax.evaluation.suite_data import SuiteData
from sao_jax.evaluation.suite_environment import TEMPERATURE
from sao_jax.evaluation.suite_episodes import EpisodeFile, SuiteEpisode, read_episodes, suite_episode
from sao_jax.interrupt import Interrupted, StopSignal
from sao_jax.learner.sampler_side import make_service
from sao_jax.mirror import mirror_folder, mirrored
from sao_jax.parallel.agreement import Processes
from sao_jax.parallel.process import DataShare
from sao_jax.rollout.entries import Rollout
from sao_jax.rollout.run_episode import EpisodeLimits
from sao_jax.run_lock import run_lock
from sao_jax.types import PyTree


def identity_of(config: RunConfig, suite: Suite, data: SuiteData, policy: Mapping[str, Any]) -> dict[str, Any]:
  """Tells what is evaluated, and on what: episodes of another identity are none of the same evaluation."""
  limits = EpisodeLimits.of(
    config.rollout, context_length=config.sampler.context_length, vocab_size=config.model.vocab_size
  )
  return {
    "suite": suite.name,
    "policy": dict(policy),
    "data": data.digest(),
    "seed": config.evaluation.seed,
    "temperature": TEMPERATURE,
    "limits": dataclasses.asdict(limits),
    "environment": config_tree.to_json(config.environment),
  }


def run_suite(
  config: RunConfig,
  params: PyTree,
  version: int,
  folder: pathlib.Path,
  identity: Mapping[str, Any],
  *,
  runs: int,
  processes: Processes,
  share: DataShare,
  problems: int | None = None,
  interrupt: StopSignal | None = None,
) -> list[SuiteEpisode] | None:
  """Runs what is missing; returns all episodes to the process that writes, None to the others.

  Args:
    config: a `suite_config`.
    params: policy parameters on the sampler's devices; they must stay alive until this returns.
    version: their policy version.
    folder: of the episodes, which all processes see; gs:// too.
    identity: see `identity_of`.
    runs: attempts at each problem.
    processes: those that divide the episodes.
    share: that of this process.
    problems: the first so many; None for all.
    interrupt: ends it when a process is asked to stop; the episodes that have ended stay.

  Raises:
    ConfigError: the folder holds episodes of another evaluation, or another command runs them.
    Interrupted: a process was asked to stop.
  """
  source = config.environment.prompts(config.environment.tokenizer(), "heldout", config.evaluation.seed)
  prompts, damaged = _read(source, problems)

  # Every attempt has its place among all processes, and a number that does not depend on how many are asked for.
  numbered = [(run, prompt) for run in range(runs) for prompt in prompts]
  rollouts = [Rollout(run * len(source) + prompt.key.id, _of_run(prompt, run)) for run, prompt in numbered]
  if share.brings:
    own = rollouts[share.index :: share.count]
    with mirrored(folder, mirror_folder(folder, share.index)) as mirror:
      _run_missing(config, own, params, version, mirror.folder, share, identity, interrupt)
  else:
    follow(config, params, version, interrupt)

  # The process that writes reads what the others have written down.
  processes.gather("the end of a suite", True, lambda: interrupt is not None and interrupt.requested)
  if not processes.is_writer:
    return None
  asked = {(rollout.prompt.key.id, rollout.prompt.key.epoch) for rollout in rollouts}
  return damaged + [episode for key, episode in sorted(read_episodes(located(folder)).items()) if key in asked]


def _read(source: Sequence[Prompt], problems: int | None) -> tuple[list[Prompt], list[SuiteEpisode]]:
  """Reads the first problems; returns them, and records of those that are damaged, which are skipped."""
  prompts, damaged = [], []
  for index in range(len(source))[:problems]:
    try:
      prompts.append(source[index])
    except BadPrompt as problem:
      logging.warning("a problem is skipped: %s; %s.", problem.problem, problem.remedy)
      damaged.append(suite_episode(index, 0, problem, {}))
  return prompts, damaged


def _run_missing(
  config: RunConfig,
  rollouts: Sequence[Rollout],
  params: PyTree,
  version: int,
  folder: pathlib.Path,
  share: DataShare,
  identity: Mapping[str, Any],
  interrupt: StopSignal | None,
) -> None:
  """Runs the episodes of this process that no file holds yet."""
  texts: dict[tuple[int, int], Mapping[str, str]] = {}

  def keep_texts(prompt: Prompt, told: Mapping[str, str], reward: float) -> None:
    texts[prompt.key.id, prompt.key.epoch] = dict(told)

  # Two commands at a time would run the same episodes, and write into the same lines.
  lock = run_lock(folder, patience=config.training.lock_seconds, first_process=share.first)
  with lock, EpisodeFile(folder, share.index, identity) as file:
    known = read_episodes(folder)
    is_done = lambda key: key in known and known[key].done
    missing = [rollout for rollout in rollouts if not is_done((rollout.prompt.key.id, rollout.prompt.key.epoch))]
    logging.info("%d of %d episodes are to be run.", len(missing), len(rollouts))
    if not missing and config.rollout.hosts_per_sampler == 1:  # or others wait to follow in this sampler
      return

    def write(rollout: Rollout, outcome: Outcome) -> SuiteEpisode:
      problem, run = rollout.prompt.key.id, rollout.prompt.key.epoch
      episode = suite_episode(problem, run, outcome, texts.pop((problem, run), {}))
      file.append(episode)
      return episode

    # Trajectories are long, and there may be thousands: only the records stay.
    kept = dataclasses.replace(config, environment=KeepTexts(config.environment, keep_texts))
    with make_service(config, params, seed=config.evaluation.seed, version=version) as sampler:
      try:
        run_rollouts(kept, sampler, missing, temperature=TEMPERATURE, interrupt=interrupt, keep=write)
      except Interrupted:
        logging.info("The episodes that have ended are in %s: the same command goes on from there.", folder)
        raise


def _of_run(prompt: Prompt, run: int) -> Prompt:
  """Names the attempt: what an environment draws by its prompt's key is another in each run."""
  return dataclasses.replace(prompt, key=prompt.key._replace(epoch=run))
