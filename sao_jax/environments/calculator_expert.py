"""Imperfect demonstrations of the calculator task: right most of the time, so that imitation works and RL is needed.

Every step goes wrong with the same probability, in one of the ways in which small language models fail. What follows a
mistake is consistent with it: the expert goes on from what the tool really said, and repeats a call that was refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sao_jax.environments import arithmetic
from sao_jax.environments.base import Demonstration, Prompt

if TYPE_CHECKING:
  from sao_jax.environments.calculator import CalculatorEpisode

MISTAKES = ("digit", "operator", "order", "early answer", "malformed")


def demonstrate(episode: CalculatorEpisode, prompt: Prompt, rng: np.random.Generator, noise: float) -> Demonstration:
  """Plays one whole episode against the environment itself, so the ids are exactly those of a real one.

  Args:
    episode: a fresh episode.
    prompt: its prompt.
    rng: decides which steps go wrong and how.
    noise: probability that a step goes wrong.
  """
  tokenizer = episode.tokenizer
  pieces, masks = [episode.begin(prompt)], [False]
  operands, operators = arithmetic.parse_question(prompt.data["question"])
  reward = None
  while reward is None:
    mistake = MISTAKES[rng.integers(len(MISTAKES))] if rng.random() < noise else None
    index = arithmetic.next_operation(operators) if operators else 0
    if not operators:
      kind, text = "<|answer|>", str(operands[0]) if mistake is None else change_digit(str(operands[0]), rng)
    elif mistake == "early answer":
      kind, text = "<|answer|>", str(operands[index])
    else:
      if mistake == "order":  # compute another pair first, or swap the only one
        index = (index + 1) % len(operators)
        if len(operators) == 1:
          operands = operands[::-1]
      kind, text = "<|tool_call|>", write_call(operands, operators, index, mistake, rng)
    action = np.concatenate(
      [tokenizer.encode_with_specials(kind), tokenizer.encode(text), tokenizer.encode_with_specials("<|end|>")]
    )
    result = episode.respond(action)
    reward = result.reward
    pieces += [action, result.observation]
    masks += [True, False]
    value = arithmetic.evaluate_call(text)
    if not result.done and value is not None:
      operands, operators = arithmetic.reduce(operands, operators, index, value)
  return Demonstration(
    np.concatenate(pieces).astype(np.int32),
    np.concatenate([np.full(len(piece), mask, dtype=bool) for piece, mask in zip(pieces, masks)]),
    reward,
  )


def write_call(
  operands: list[int], operators: list[str], index: int, mistake: str | None, rng: np.random.Generator
) -> str:
  """Text of the call for operation `index`, with the mistake in it if it is one of spelling."""
  left, operator, right = str(operands[index]), operators[index], str(operands[index + 1])
  if mistake == "operator":
    operator = str(rng.choice([other for other in arithmetic.OPERATORS if other != operator]))
  if mistake == "digit":
    if rng.random() < 0.5:
      left = change_digit(left, rng)
    else:
      right = change_digit(right, rng)
  if mistake == "malformed":
    operator = str(rng.choice(["", operator + "*"]))  # no operator, or one too many
  return left + operator + right


def change_digit(number: str, rng: np.random.Generator) -> str:
  """The number with one of its digits replaced by another digit."""
  places = [place for place, character in enumerate(number) if character.isdigit()]
  place = int(rng.choice(places))
  other = (int(number[place]) + int(rng.integers(1, 10))) % 10
  return f"{number[:place]}{other}{number[place + 1 :]}"
