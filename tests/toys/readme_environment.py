"""A complete environment: guess a number from 1 to 9, told "higher" or "lower" after every guess."""

from __future__ import annotations

import dataclasses

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import Environment, StepResult
from sao_jax.episode import Prompt, PromptKey
from sao_jax.rewards.exact_match import parse_integer


class Guessing(Environment):
  name = "guess_number"

  def __init__(self, tokenizer):
    self.tokenizer, self.stop_ids = tokenizer, (tokenizer.end_id,)

  async def reset(self, prompt):
    self.secret, self.guesses = prompt.data["secret"], 0
    return self.tokenizer.encode_with_specials("<|bos|><|user|>guess 1-9<|end|><|assistant|>")

  async def step(self, action_ids):
    guess = parse_integer(self.tokenizer.decode_bytes(action_ids[:-1]))  # None for anything but a number
    self.guesses += 1
    if guess == self.secret or self.guesses == 4:
      return StepResult(observation=[], done=True, reward=float(guess == self.secret))
    hint = "error" if guess is None else "higher" if guess < self.secret else "lower"
    return StepResult(self.tokenizer.encode_with_specials(f"<|user|>{hint}<|end|><|assistant|>"), done=False)


@dataclasses.dataclass(frozen=True)
class GuessNumber:
  name: str = "guess_number"
  tokenizer = ByteTokenizer
  make = staticmethod(Guessing)

  def prompts(self, tokenizer, split, seed):
    return [Prompt(PromptKey(self.name, i, 0), {"secret": i + 1}) for i in range(9)]
