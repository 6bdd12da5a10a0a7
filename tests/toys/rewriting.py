"""An environment that rewrites its history, and episodes played on it without a model."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from sao_jax.environments.base import Environment, StepResult
from sao_jax.episode import Prompt, PromptKey
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from toys.rollout_fakes import STOP, VOCAB_SIZE, completion

LIMITS = EpisodeLimits(
  max_turns=9, max_tokens=1000, max_tokens_per_turn=8, context_length=20, trajectory_length=60, vocab_size=VOCAB_SIZE
)


KEY = PromptKey("rewriting", 0, 0)


class Rewriting(Environment):
  """Every second observation replaces the context by itself."""

  name, stop_ids = "rewriting", (STOP,)

  def __init__(self, turns=4, fresh=(5, 6, 7), last=()):
    self.turns, self.fresh, self.last, self.count = turns, list(fresh), list(last), 0

  async def reset(self, prompt):
    return np.array([3, 4], np.int32)

  async def step(self, action_ids):
    self.count += 1
    if self.count == self.turns:
      return StepResult(self.last, True, 1.0)
    rewrites = self.count % 2 == 0
    return StepResult(self.fresh if rewrites else [8], False, new_context=rewrites)


def play(environment, reply, **limits):
  requests = []

  async def sample(request):
    requests.append(request)
    return completion(reply[: request.max_tokens], stop_ids=request.stop_ids)

  limits = dataclasses.replace(LIMITS, **limits)
  return requests, asyncio.run(run_episode(environment, Prompt(KEY, {}), sample, 5, limits, session_id=0))
