# A complete environment: one of the digits shown is hidden, and a wrong guess is told + (higher) or - (lower).
import dataclasses
import itertools

from sao_jax.data import ByteTokenizer, split_of
from sao_jax.data.prompts import check_split
from sao_jax.environments import Environment, StepResult
from sao_jax.episode import Prompt, PromptKey


class Guessing(Environment):
  def __init__(self, settings, tokenizer):
    self.name, self.tokenizer, self.stop_ids = settings.name, tokenizer, tuple(tokenizer.encode("12345678").tolist())

  async def reset(self, prompt):
    self.hidden, self.guesses = prompt.data["hidden"], 0
    return self.tokenizer.encode_with_specials(f"<|bos|><|user|>{prompt.data['shown']}<|end|><|assistant|>")

  async def step(self, action_ids):
    guess, self.guesses = self.tokenizer.decode(action_ids[-1:]), self.guesses + 1
    if guess == self.hidden or self.guesses == 3:
      return StepResult(observation=[], done=True, reward=float(guess == self.hidden))
    hint = "+" if guess < self.hidden else "-"
    return StepResult(self.tokenizer.encode_with_specials(f"<|user|>{hint}<|end|><|assistant|>"), done=False)


@dataclasses.dataclass(frozen=True)
class GuessNumber:
  name: str = "guess_number"

  def tokenizer(self):
    return ByteTokenizer()

  def make(self, tokenizer):
    return Guessing(self, tokenizer)

  def prompts(self, tokenizer, split, seed):
    hands = ("".join(hand) for size in range(2, 9) for hand in itertools.combinations("12345678", size))
    games = [(hand, digit) for hand in hands if split_of(hand) == check_split(split) for digit in hand]
    return [Prompt(PromptKey(self.name, i, 0), {"shown": s, "hidden": d}) for i, (s, d) in enumerate(games)]
