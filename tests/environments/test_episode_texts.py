"""Texts of episodes reach whoever keeps them, once, when the episode has ended."""

from __future__ import annotations

import asyncio

from sao_jax.environments.base import Environment, StepResult
from sao_jax.environments.episode_texts import HasTexts, KeepTexts
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.episode import Prompt, PromptKey, Status

PROMPT = Prompt(PromptKey("writer", 5, 2), {})


class Writer(Environment):
  """Writes one word in each turn, two in all."""

  name, stop_ids = "writer", (1,)

  async def reset(self, prompt):
    self.texts = {}
    return [0]

  async def step(self, action_ids):
    self.texts["words"] = self.texts.get("words", "") + "word "
    done = self.texts["words"].count("word") == 2
    return StepResult([0], done, 0.25 if done else None)

  async def on_truncated(self, status):
    self.texts["words"] += "cut"
    return 0.125


class Writing:
  """The settings of it."""

  name = "writer"

  def make(self, tokenizer):
    return Writer()


def test_texts_are_kept_at_the_end_through_other_wrappers_and_not_before():
  kept = []
  settings = KeepTexts(SimulatedLatency(Writing(), mean=0.0), lambda *told: kept.append(told))

  async def play(last):
    episode = settings.make(None)
    assert isinstance(episode, HasTexts)
    await episode.reset(PROMPT)
    await episode.step([1])
    assert not kept
    await last(episode)
    await episode.close()

  asyncio.run(play(lambda episode: episode.step([1])))
  assert kept == [(PROMPT, {"words": "word word "}, 0.25)]
  kept.clear()
  asyncio.run(play(lambda episode: episode.on_truncated(Status.TRUNCATED_TURNS)))
  assert kept == [(PROMPT, {"words": "word cut"}, 0.125)]
