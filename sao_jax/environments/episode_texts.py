"""Texts that an episode leaves beside its reward, such as a patch or an answer; `StepResult.info` holds numbers only.

An environment that has some tells them by an attribute, `texts`, before its last call returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Environment, StepResult
from sao_jax.environments.wrappers import WrappedEpisode, Wrapper
from sao_jax.episode import Prompt, Status

Keep = Callable[[Prompt, Mapping[str, str], float], None]  # (prompt, texts, the last reward)


@runtime_checkable
class HasTexts(Protocol):
  """An episode with texts.

  Attributes:
    texts: name -> text, complete when the last `step` or `on_truncated` returns.
  """

  texts: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class KeepTexts(Wrapper):
  """Settings of an environment whose episodes hand their texts to `keep` when they end, in whatever way that is graded.

  Episodes that fail, and are replaced, hand over nothing. `keep` is called on the event loop, and must not wait.

  >>> import asyncio
  >>> from sao_jax.environments.calculator import Calculator
  >>> from sao_jax.episode import PromptKey
  >>> kept = []
  >>> settings = KeepTexts(Calculator(), lambda *told: kept.append(told))
  >>> tokenizer = settings.tokenizer()
  >>> episode = settings.make(tokenizer)
  >>> async def play():
  ...   await episode.reset(Prompt(PromptKey("calculator", 7, 0), {"question": "3-12*7"}))
  ...   await episode.step(tokenizer.encode_with_specials("<|answer|>-81<|end|>"))
  >>> asyncio.run(play())
  >>> kept[0][0].key.id, kept[0][1:]  # the calculator tells no text
  (7, ({}, 1.0))
  """

  keep: Keep

  def make(self, tokenizer: Tokenizer) -> KeepTextsEpisode:
    return KeepTextsEpisode(self.inner.make(tokenizer), self.keep)


class KeepTextsEpisode(WrappedEpisode):
  """The inner episode, whose texts are handed over at its end."""

  def __init__(self, inner: Environment, keep: Keep):
    super().__init__(inner)
    self._keep = keep

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._prompt = prompt
    return await self._inner.reset(prompt)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    result = await self._inner.step(action_ids)
    if result.done:
      self._keep(self._prompt, self.texts, float(result.reward))
    return result

  async def on_truncated(self, status: Status) -> float:
    reward = await self._inner.on_truncated(status)
    self._keep(self._prompt, self.texts, float(reward))
    return reward
