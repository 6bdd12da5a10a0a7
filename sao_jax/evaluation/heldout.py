"""Held-out success of one policy version, with its confidence interval."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from absl import logging

from sao_jax.config import RunConfig
from sao_jax.episode import BadPrompt, Trajectory
from sao_jax.evaluation.fixed_policy import read_prompts, run_episodes
from sao_jax.interrupt import StopSignal
from sao_jax.learner.placement import place
from sao_jax.learner.sampler_side import make_service
from sao_jax.parallel.agreement import Processes
from sao_jax.parallel.process import WHOLE, DataShare
from sao_jax.report.by_environment import SEPARATOR, added, success_sums
from sao_jax.report.success_rate import Success, success
from sao_jax.sampler.fixed_weights import FixedSampler
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.service import SamplerService
from sao_jax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Result of an evaluation: success, reward and length of one policy version on held-out prompts.

  Attributes:
    success: rate over the graded episodes, with its Wilson interval.
    mean_reward: mean return of the same episodes.
    mean_sampled: sampled tokens per episode.
    ungraded: number of prompts whose environment failed; they enter no statistic.
    policy_version: the version that sampled every token.
    trajectories: the episodes.
    skipped: number of prompts that nobody can attempt: too long, empty or damaged; they enter no statistic, either.
    environments: sums of the graded episodes of each environment, by its name, see `success_sums`.
  """

  success: Success
  mean_reward: float
  mean_sampled: float
  ungraded: int
  policy_version: int
  trajectories: list[Trajectory]
  skipped: int = 0
  environments: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

  def __str__(self) -> str:
    left_out = ((self.ungraded, "could not be graded"), (self.skipped, "skipped"))
    parts = [f"{name} {each}" for name, each in self.successes.items()] if len(self.environments) > 1 else []
    return ", ".join([str(self.success), *parts, *(f"{count} prompts {what}" for count, what in left_out if count)])

  @property
  def successes(self) -> dict[str, Success]:
    """The success of each environment, by its name."""
    confidence = self.success.confidence
    return {
      name: success(sums["successes"], sums["trials"], confidence) for name, sums in sorted(self.environments.items())
    }

  def metrics(self) -> dict[str, float]:
    """Returns the numbers for the metrics file; those of several environments behind the ones of all episodes."""
    own: dict[str, float] = {}
    for name, each in self.successes.items() if len(self.environments) > 1 else ():
      reward = self.environments[name]["reward"] / each.trials if each.trials else float("nan")
      values = {"success": each.rate, "low": each.low, "high": each.high, "trials": each.trials, "reward": reward}
      own |= {f"heldout_{key}{SEPARATOR}{name}": value for key, value in values.items()}
    return own | {
      "heldout_success": self.success.rate,
      "heldout_low": self.success.low,
      "heldout_high": self.success.high,
      "heldout_trials": self.success.trials,
      "heldout_reward": self.mean_reward,
      "heldout_response_length": self.mean_sampled,
      "heldout_ungraded": self.ungraded,
      "heldout_skipped": self.skipped,
    }


def evaluate(
  config: RunConfig,
  params: PyTree,
  version: int,
  interrupt: StopSignal | None = None,
  *,
  service: SamplerService | FollowingService | None = None,
  share: DataShare = WHOLE,
) -> Evaluation:
  """Runs `evaluation.prompts` held-out prompts, or all there are, with fixed weights.

  Args:
    config: the run's configuration.
    params: policy parameters on the sampler's devices; they must stay alive until this returns.
    version: their policy version.
    interrupt: ends it when the process is asked to stop; one that only follows tells its leader by it, see
      `SharedStop`.
    service: a started sampler whose slots it shares, with these weights whatever is published; None: one of its own.
    share: of the prompts, which the processes that sample divide; of one without a share nothing is wanted. See
      `merged`.

  Raises:
    Interrupted: the process was asked to stop.

  Example:
    weights = make_publisher(learner)(state.policy.params)
    print(evaluate(config, weights, version=0).success)
  """
  # Each held-out prompt is used once: a repeated one would narrow the interval without telling anything new.
  settings = config.evaluation
  if not share.brings:
    if service is None:
      follow(config, params, version, interrupt)
    return Evaluation(success(0, 0, settings.confidence), float("nan"), float("nan"), 0, version, [])
  source = config.environment.prompts(config.environment.tokenizer(), "heldout", settings.seed)
  if len(source) < settings.prompts:
    logging.warning(
      "The held-out split has %d prompts, not evaluation.prompts=%d: each is used once.", len(source), settings.prompts
    )
  prompts, damaged = read_prompts(source, settings.prompts)
  names = {prompt.key.environment for prompt in prompts}
  index, count = share
  first, prompts, damaged = index * len(prompts), prompts[index::count], damaged[index::count]

  # Every token must be a sample of this one version.
  with contextlib.ExitStack() as stack:
    if service is not None:
      sampler = FixedSampler(service, params, version, settings.seed)
    else:
      sampler = stack.enter_context(make_service(config, params, seed=settings.seed, version=version))
    trajectories, failures = run_episodes(
      config,
      sampler,
      prompts,
      temperature=settings.temperature,
      first_rollout_id=first,  # no two processes draw the same random numbers
      interrupt=interrupt,
    )
  versions = {int(v) for t in trajectories for v in np.unique(t.policy_version[t.action_mask])}
  if versions - {version}:
    raise AssertionError(f"an evaluation of version {version} sampled tokens with versions {sorted(versions)}")

  # Failures of the environment, and prompts that nobody can attempt, are counted, not graded.
  skipped = sum(isinstance(failure, BadPrompt) for failure in failures)
  rewards = [trajectory.reward for trajectory in trajectories]
  return Evaluation(
    success=success(sum(reward >= settings.success_threshold for reward in rewards), len(rewards), settings.confidence),
    mean_reward=float(np.mean(rewards)) if rewards else float("nan"),
    mean_sampled=float(np.mean([t.num_sampled for t in trajectories])) if trajectories else float("nan"),
    ungraded=len(failures) - skipped,
    policy_version=version,
    trajectories=trajectories,
    skipped=skipped + len(damaged),
    environments=success_sums(trajectories, settings.success_threshold, names),
  )


def follow(config: RunConfig, params: PyTree, version: int, interrupt: StopSignal | None = None) -> None:
  """Samples for the process that leads this one's sampler, until that has ended; returns at once without one."""
  if place(config).follows:
    with make_service(config, params, seed=config.evaluation.seed, version=version) as follower:
      follower.wait(lambda: interrupt is not None and interrupt.requested)  # which tells the others


def merged(
  config: RunConfig, processes: Processes, own: Evaluation | None, look: Callable[[], object] = lambda: None
) -> Evaluation | None:
  """Returns the evaluation of all processes, made of their shares; None if a process has none. All call it together.

  The trajectories stay those of this process. `look` is called now and then while others are waited for; it may raise.
  """
  if processes.count == 1:
    return own

  # Each sends its sums; the trajectories are too large for that.
  sums = None
  if own is not None:
    trials = own.success.trials
    sums = {
      "successes": sum(each.reward >= config.evaluation.success_threshold for each in own.trajectories),
      "trials": trials,
      "reward": own.mean_reward * trials if trials else 0.0,
      "sampled": own.mean_sampled * trials if trials else 0.0,
      "ungraded": own.ungraded,
      "skipped": own.skipped,
      "environments": dict(own.environments),
    }
  shares = processes.gather("the shares of an evaluation", sums, look)
  if None in shares:
    return None

  # Means and interval are made of the sums, as if one process had run all episodes.
  environments = added(share.pop("environments") for share in shares)
  total = {name: sum(share[name] for share in shares) for name in shares[0]}
  trials = total["trials"]
  return dataclasses.replace(
    own,
    success=success(total["successes"], trials, config.evaluation.confidence),
    mean_reward=total["reward"] / trials if trials else float("nan"),
    mean_sampled=total["sampled"] / trials if trials else float("nan"),
    ungraded=total["ungraded"],
    skipped=total["skipped"],
    environments=environments,
  )
