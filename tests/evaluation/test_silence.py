"""Episodes of a fixed policy in which nothing happens end with a sentence, after the configured silence."""

from __future__ import annotations

import asyncio

import pytest
from toys import training_toy

from sao_jax.episode import Prompt, PromptKey
from sao_jax.evaluation.fixed_policy import run_episodes
from sao_jax.rollout.outcomes import RolloutSilent


class Silent:
  """A sampler that never answers."""

  error, progress = None, 0

  def new_session(self):
    return 0

  def release(self, session_id):
    pass

  async def generate(self, request):
    await asyncio.Event().wait()


def test_an_evaluation_that_has_gone_silent_ends_with_the_place_where_it_waits():
  config = training_toy.replace(training_toy.get_config(), training={"watchdog_seconds": 0.01})
  with pytest.raises(RolloutSilent, match=r"(?s)nothing has happened for .* in 1 episodes.*generate"):
    run_episodes(config, Silent(), [Prompt(PromptKey("parity", 0, 0), {"number": 1})], temperature=1.0)
