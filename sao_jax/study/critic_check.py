"""A run's critic beside the oracle of its task, on fresh episodes of the run's own policy."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from sao_jax.config import RunConfig
from sao_jax.errors import ConfigError, RunError
from sao_jax.evaluation.fixed_policy import read_prompts, run_episodes
from sao_jax.learner import sampler_side, setup
from sao_jax.learner.batches import packed_batch
from sao_jax.learner.packing import unpack
from sao_jax.study.oracle import StatedEpisode, explain
from sao_jax.training import phases
from sao_jax.training.heldout_critic import make_reader


def check_critic(config: RunConfig, workdir: pathlib.Path, phase: str, trajectories: int) -> dict[str, Any]:
  """Samples episodes, and returns their mean return, the explained variances and how many there were.

  The prompts are training prompts under `evaluation.seed`: many more than are held out, and not those of the run.

  Args:
    config: the run's configuration.
    workdir: its folder.
    phase: whose policy and critic: "value_pretraining" or "train".
    trajectories: episodes to sample.

  Raises:
    ConfigError: the environment knows no states, the method has no critic, or the phase no checkpoint.
  """
  environment = config.environment
  if not hasattr(environment, "states"):
    name = type(environment).__name__
    raise ConfigError("environment", f"{name} tells no states.", "Give it a method `states`, as in WRITE.md.")
  learner = setup.make_learner(config)
  if learner.critic is None:
    raise ConfigError("algorithm.advantage", "this method has no critic.", "Look at a run of --method=sao.")
  policy, critic = phases.load_networks(learner, workdir, phase)

  # Episodes under the frozen policy.
  weights = sampler_side.make_publisher(learner)(policy)
  source = environment.prompts(environment.tokenizer(), "train", config.evaluation.seed)
  prompts, _ = read_prompts(source, min(trajectories, len(source)))
  with sampler_side.make_service(config, weights, seed=config.evaluation.seed) as service:
    episodes, failures = run_episodes(config, service, prompts, temperature=config.sampler.temperature)
  if not episodes:
    raise RunError(f"there are no episodes, {len(failures)} failed, as this one: {failures[0] if failures else ''}")

  # The critic reads them in batches; what it says goes through the rows in the place of rewards and log-probs.
  read, size, stated = make_reader(learner), config.rollout.batch_size, []
  for start in range(0, len(episodes), size):
    rows = packed_batch(learner, episodes[start : start + size]).rows
    values, targets, _ = read(critic, rows)
    for fields in unpack(rows.replace(rewards=values, behavior_logprobs=targets)):
      sampled = fields["action_mask"]
      states = environment.states(fields["token_ids"], sampled)
      stated.append(StatedEpisode(states, fields["behavior_logprobs"][sampled], fields["rewards"][sampled]))
  return {
    "phase": phase,
    "trajectories": len(episodes),
    "tokens": sum(len(each.states) for each in stated),
    "reward_mean": float(np.mean([each.reward for each in episodes])),
    **explain(stated)._asdict(),
  }
