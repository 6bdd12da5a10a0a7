"""Prompts as the rollout side draws them: one after the other, each checked before anything keeps it."""

from __future__ import annotations

import numbers
from typing import Any, Protocol

from sao_jax.episode import BadPrompt, Prompt
from sao_jax.json_values import storable_text, unstorable

_REMEDY = "give prompts JSON values only (sao_jax/json_values.py): checkpoints hold the prompts that are under way"


class PromptStream(Protocol):
  """Prompts in order; its state is JSON. A BadPrompt stands for one item, and the next call goes on behind it."""

  def __next__(self) -> Prompt: ...
  def get_state(self) -> Any: ...
  def set_state(self, state: Any) -> None: ...


def draw_prompt(prompts: PromptStream) -> Prompt | BadPrompt | None:
  """Draws the next prompt; returns the error for one that nobody can attempt, and None where there is none."""
  try:
    return check_prompt(next(prompts))
  except StopIteration:
    return None
  except BadPrompt as problem:
    return problem


def check_prompt(prompt: Prompt) -> Prompt:
  """Returns a prompt as it came out of its source.

  Raises:
    BadPrompt: a checkpoint could not bring it back as it is; the error names the place.
  """
  environment, *numbers_of_key = prompt.key
  if not isinstance(environment, str) or not storable_text(environment):
    problem = f"the environment of its key is {environment!r:.80}, which is no name"
  elif not all(isinstance(number, numbers.Integral) for number in numbers_of_key):
    problem = "id and epoch of its key must be whole numbers"
  elif type(prompt.data) is not dict:
    problem = f"data is a {type(prompt.data).__name__}, not a dict"
  else:
    problem = unstorable(prompt.data, "data")

  if problem:
    name = f"prompt {tuple(prompt.key)!r:.120}"
    raise BadPrompt("prompts", f"{name} cannot be stored: {problem}", _REMEDY, reason="prompt_unstorable")
  return prompt
