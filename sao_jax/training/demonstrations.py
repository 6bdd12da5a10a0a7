"""Demonstrations that the environment produces, as trajectories: for imitation, and for the critic's first course."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sao_jax.config import RunConfig
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.environments.base import check_token_ids
from sao_jax.episode import BadPrompt, EnvironmentFailure, Prompt, PromptKey, Status, Trajectory
from sao_jax.errors import ConfigError
from sao_jax.parallel.process import WHOLE, DataShare
from sao_jax.rollout.bad_prompts import BadPrompts
from sao_jax.training import phases

# Sources may draw a prompt from (seed, id): the expert's mistakes must come from another stream than the question.
DEMONSTRATION_STREAM = 0x5AFE_DE30


class Demonstrations:
  """Endless batches of demonstrations on the training prompts.

  Every demonstration's randomness comes from its prompt's key and the seed, so a restored iterator goes on exactly.

  Attributes:
    prompts: where they come from.
    bad_prompts: those that were skipped.
  """

  def __init__(
    self,
    config: RunConfig,
    phase: str = phases.SFT,
    leave_out: Callable[[PromptKey], bool] = lambda key: False,
    share: DataShare = WHOLE,
  ):
    """Args:
    config: the run's configuration.
    phase: name of the phase, which has its own order of prompts.
    leave_out: True for prompts that are passed over.
    share: of the prompts; a process without one makes no demonstrations.

    Raises:
      ConfigError: the environment makes none.
    """
    self._config, self._environment, self._leave_out = config, config.environment, leave_out
    if not hasattr(self._environment, "demonstration"):
      raise ConfigError(
        "environment",
        f"{self._environment.name} produces no demonstrations to imitate",
        "give its settings a `demonstration(prompt, tokenizer, rng)` method, or start RL from model.checkpoint",
      )
    self._tokenizer, self.bad_prompts = self._environment.tokenizer(), BadPrompts()
    source = self._environment.prompts(self._tokenizer, "train", config.training.seed)
    self.prompts = make_prompt_iterator(
      source, seed=phases.prompt_seed(config, phase), shard=(share.index or 0, share.count)
    )

  def batch(self, size: int | None = None) -> list[Trajectory]:
    """Makes the next `size` demonstrations, by default `sft.batch_size`, as trajectories without behaviour log-probs.

    Prompts are skipped whose demonstration is too long, is none, or fails with an `EnvironmentFailure`, and those that
    their source calls damaged. Any other exception of the expert is raised as itself.

    Raises:
      NothingButBadPrompts: very many in a row were skipped.
    """
    batch: list[Trajectory] = []
    size = self._config.sft.batch_size if size is None else size
    while len(batch) < size:
      prompt = None
      try:
        prompt = next(self.prompts)
        if self._leave_out(prompt.key):
          continue
        batch.append(self._demonstrate(prompt, len(batch)))
      except BadPrompt as problem:
        self.bad_prompts.skip(problem, prompt and prompt.key)
      except EnvironmentFailure as failure:
        self.bad_prompts.skip(_failed(failure), prompt.key)
      else:
        self.bad_prompts.good()
    return batch

  def _demonstrate(self, prompt: Prompt, index: int) -> Trajectory:
    # Randomness of its own for every prompt and epoch.
    key = prompt.key
    rng = np.random.default_rng([DEMONSTRATION_STREAM, self._config.training.seed, key.id, key.epoch])
    demonstration = self._environment.demonstration(prompt, self._tokenizer, rng)
    name, vocab_size = self._environment.name, self._config.model.vocab_size
    ids = check_token_ids(demonstration.token_ids, environment=name, vocab_size=vocab_size, what="the demonstration")
    mask = np.asarray(demonstration.action_mask)
    if mask.dtype != np.bool_ or mask.shape != ids.shape:
      raise EnvironmentFailure(name, f"the demonstration's mask is {mask.dtype} {mask.shape}, of {len(ids)} tokens")

    # It must fit where an episode would.
    length = len(ids)
    if length > self._config.sampler.context_length:
      name, context = str(tuple(key)), self._config.sampler.context_length
      raise BadPrompt(
        "sampler.context_length",
        f"the demonstration on prompt {name} has {length} tokens, more than the context of {context}",
        f"set sampler.context_length and the largest rollout.row_lengths to at least {length}",
        reason="demonstration_too_long",
      )

    # The policy sampled none of it: neither log-probs nor versions.
    return Trajectory(
      token_ids=ids,
      action_mask=mask,
      behavior_logprobs=np.full(length, np.nan, np.float32),
      policy_version=np.full(length, -1, np.int32),
      turn_starts=np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1).astype(np.int32),
      reward=demonstration.reward,
      turn_rewards=demonstration.turn_rewards,
      status=Status.TERMINATED,
      key=key,
      rollout_id=index,
    )


def _failed(failure: EnvironmentFailure) -> BadPrompt:
  return BadPrompt(
    *("environment", str(failure), "mend the environment's `demonstration`, or leave such prompts out"),
    reason="demonstration_failed",
  )
