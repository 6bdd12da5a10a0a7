"""A policy that is a function of what it reads: whole episodes through the driver, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from sao_jax.environments.base import Environment, EnvironmentSpec
from sao_jax.episode import Prompt, Trajectory
from sao_jax.rollout.run_episode import EpisodeLimits, run_episode
from sao_jax.sampler.requests import Completion

WIDE = EpisodeLimits(99, 10**6, 10**6, 10**6, 10**6, 10**6)


async def episode(
  environment: Environment,
  tokenizer,
  prompt: Prompt,
  policy: Callable[[str], str],
  limits: EpisodeLimits = WIDE,
  timeout: float = 60.0,
) -> Trajectory:
  """Plays one episode and closes it; the policy answers the text of the tokens that are new to it."""

  async def generate(request):
    said = policy(tokenizer.decode(request.new_token_ids))
    ids = np.append(tokenizer.encode_with_specials(said), environment.stop_ids[0]).astype(np.int32)
    ids = ids[: request.max_tokens]
    ended = "stop" if ids[-1] == environment.stop_ids[0] else "length"
    return Completion(ids, np.full(len(ids), -1.0, np.float32), np.zeros(len(ids), np.int32), ended)

  try:
    return await run_episode(environment, prompt, generate, 0, limits, session_id=0, timeout=timeout)
  finally:
    await environment.close()


def play(settings: EnvironmentSpec, prompt: Prompt, policy: Callable[[str], str], **options) -> Trajectory:
  """Plays one episode of an environment's settings."""
  tokenizer = settings.tokenizer()
  return asyncio.run(episode(settings.make(tokenizer), tokenizer, prompt, policy, **options))
