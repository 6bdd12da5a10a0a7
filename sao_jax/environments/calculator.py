"""Calculator: a multi-turn tool task. A question with several operands, a tool that takes two, one answer.

    <|bos|><|user|>3-12*7<|end|><|assistant|>             prompt
    <|tool_call|>12*7<|end|>                              action
    <|observation|>84<|end|><|assistant|>                 observation
    <|tool_call|>3-84<|end|>                              action
    <|observation|>-81<|end|><|assistant|>                observation
    <|answer|>-81<|end|>                                  action, ends the episode

The reward is 1 when the answer is the right integer, with or without a tool call, else 0. Anything else that the policy
writes is its own fault: the observation is "error", and the turn counts as a call. An episode that asks for more than
`max_calls` calls ends with reward 0.

The expert (`demonstrate`) computes one operation per call and makes mistakes on purpose.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments import arithmetic
from sao_jax.environments.base import Demonstration, Environment, StepResult
from sao_jax.environments.token_turns import turns_of
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError
from sao_jax.rewards.exact_match import integer_match

MAX_DRAWS = 1000  # 0.9 ** 1000 = 2e-46: only a handful of different questions has none in a split
MAX_HELDOUT = 10_000  # held-out questions, where there are more
MISTAKES = ("digit", "operator", "order", "early answer", "malformed")  # of the expert, equally likely


@dataclasses.dataclass(frozen=True)
class Calculator:
  """Settings of the task."""

  name: str = "calculator"
  num_operands: int = 3
  max_operand: int = 9
  operators: str = arithmetic.OPERATORS
  max_calls: int = 4  # turns without an answer; one more ends the episode with reward 0
  num_prompts: int = 100_000  # per epoch, in which questions may repeat; held-out ones do not, and may be fewer
  demonstration_noise: float = 0.3  # chance that one step of a demonstration goes wrong

  def __post_init__(self):
    checks = (
      ("num_operands", 2 <= self.num_operands <= 6, "between 2 and 6"),
      ("max_operand", 2 <= self.max_operand <= 99, "between 2 and 99"),
      ("operators", bool(self.operators) and set(self.operators) <= set(arithmetic.OPERATORS), "some of + - *"),
      ("max_calls", self.max_calls >= self.num_operands - 1, "at least num_operands - 1"),
      ("num_prompts", self.num_prompts >= 1, "at least 1"),
      ("demonstration_noise", 0.0 <= self.demonstration_noise <= 1.0, "between 0 and 1"),
    )
    for field, valid, remedy in checks:
      if not valid:
        raise ConfigError(f"environment.{field}", f"{getattr(self, field)!r} cannot work.", f"Use {remedy}.")

  def tokenizer(self) -> ByteTokenizer:
    return ByteTokenizer()

  def make(self, tokenizer: ByteTokenizer) -> CalculatorEpisode:
    return CalculatorEpisode(self, tokenizer)

  def prompts(self, tokenizer: ByteTokenizer, split: str, seed: int) -> Sequence[Prompt]:
    return HeldoutPrompts(self, seed) if check_split(split) == "heldout" else TrainingPrompts(self, seed)

  def demonstration(self, prompt: Prompt, tokenizer: ByteTokenizer, rng: np.random.Generator) -> Demonstration:
    """Plays the expert, whose every step goes wrong with probability `demonstration_noise`."""
    return demonstrate(self.make(tokenizer), prompt, rng, self.demonstration_noise)

  def states(self, token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]) -> list[Hashable]:
    """Tells the task's state before every sampled token of an episode: see `states_of`."""
    return states_of(self.tokenizer(), token_ids, action_mask)


class TrainingPrompts(Sequence[Prompt]):
  """Training questions by index: the first one among the draws (seed, index, 0), (seed, index, 1), ..."""

  def __init__(self, settings: Calculator, seed: int):
    self._settings, self._seed = settings, seed

  def __len__(self) -> int:
    return self._settings.num_prompts

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    settings, index = self._settings, int(index)
    for draw in range(MAX_DRAWS):
      rng = np.random.default_rng((self._seed, index, draw))
      question = arithmetic.draw_question(rng, settings.num_operands, settings.max_operand, settings.operators)
      if split_of(question) == "train":
        return Prompt(PromptKey(settings.name, index, 0), {"question": question})
    raise _too_few(settings, "train")


class HeldoutPrompts(Sequence[Prompt]):
  """Held-out questions, all different, so that the trials of an evaluation are independent.

  There are min(`num_prompts`, MAX_HELDOUT) of them, or fewer when the settings allow no more. The seed gives the order.
  """

  def __init__(self, settings: Calculator, seed: int):
    kinds = (settings.num_operands, settings.max_operand, "".join(dict.fromkeys(settings.operators)))
    total, most = arithmetic.count_questions(*kinds), min(settings.num_prompts, MAX_HELDOUT)

    # About one question in ten is held out, so drawing 20 times as many as we need (or all there are) is practically
    # certain to find enough.
    num_drawn = min(total, 20 * most + MAX_DRAWS)
    numbers = np.random.default_rng(seed).choice(total, size=num_drawn, replace=False).tolist()
    questions = (arithmetic.question_at(number, *kinds) for number in numbers)

    self._questions = list(itertools.islice((q for q in questions if split_of(q) == "heldout"), most))
    self._name = settings.name
    if not self._questions:
      raise _too_few(settings, "heldout")

  def __len__(self) -> int:
    return len(self._questions)

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    index = int(index)
    return Prompt(PromptKey(self._name, index, 0), {"question": self._questions[index]})


def _too_few(settings: Calculator, split: str) -> ConfigError:
  return ConfigError(
    "environment.max_operand",
    f"{settings.num_operands} operands up to {settings.max_operand} make too few different questions: no {split} one.",
    "Raise max_operand or num_operands, or allow more operators.",
  )


class CalculatorEpisode(Environment):
  """One episode. `begin` and `respond` are the synchronous core of `reset` and `step`: they never wait."""

  def __init__(self, settings: Calculator, tokenizer: ByteTokenizer):
    self.name, self.stop_ids = settings.name, (tokenizer.end_id,)
    self.tokenizer = tokenizer
    self._max_calls = settings.max_calls
    self._calls, self._solution = 0, 0

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    return self.begin(prompt)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    return self.respond(action_ids)

  def begin(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    """Starts the episode; returns the token ids of the prompt."""
    question = prompt.data["question"]
    self._calls, self._solution = 0, arithmetic.solve(question)
    tokenizer = self.tokenizer
    return np.concatenate(
      [
        tokenizer.encode_with_specials("<|bos|><|user|>"),
        tokenizer.encode(question),
        tokenizer.encode_with_specials("<|end|><|assistant|>"),
      ]
    )

  def respond(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    """Answers one action: grades an answer, computes a call, and says "error" to anything else."""
    kind, text = self._read(action_ids)

    # Two ways to end: an answer, or one call too many.
    if kind == self.tokenizer.answer_id:
      reward = integer_match(text, self._solution)
      return StepResult(np.zeros(0, dtype=np.int32), True, reward, {"calls": float(self._calls)})
    if self._calls == self._max_calls:
      return StepResult(np.zeros(0, dtype=np.int32), True, 0.0, {"calls": float(self._calls)})

    # Everything else counts as a call, malformed actions too.
    self._calls += 1
    is_call = kind == self.tokenizer.tool_call_id and text is not None
    value = arithmetic.evaluate_call(text) if is_call else None
    shown = "error" if value is None else str(value)
    return StepResult(self.tokenizer.encode_with_specials(f"<|observation|>{shown}<|end|><|assistant|>"), False)

  def _read(self, action_ids: Int[np.ndarray, "n"]) -> tuple[int | None, str | None]:
    """Returns (first token, text up to the end-of-turn token), None for a missing part."""
    ids = np.asarray(action_ids)
    if len(ids) < 2 or ids[-1] != self.tokenizer.end_id:
      return None, None
    return int(ids[0]), self.tokenizer.decode_bytes(ids[1:-1])


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
    # Choose the next action: an answer once no operator is left, a tool call before that.
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

    # Play it. The action is imitated, the observation is not.
    action = np.concatenate(
      [tokenizer.encode_with_specials(kind), tokenizer.encode(text), tokenizer.encode_with_specials("<|end|>")]
    )
    result = episode.respond(action)
    reward = result.reward
    pieces += [action, result.observation]
    masks += [True, False]

    # Go on with the value of the call as it was written, wrong or not; a malformed call is repeated.
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
  """Writes the call for operation `index`; a mistake in a digit, an operator or the form goes into its text."""
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
  """Replaces one digit of the number by another digit."""
  places = [place for place, character in enumerate(number) if character.isdigit()]
  place = int(rng.choice(places))
  other = (int(number[place]) + int(rng.integers(1, 10))) % 10
  return f"{number[:place]}{other}{number[place + 1 :]}"


def states_of(
  tokenizer: ByteTokenizer, token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]
) -> list[Hashable]:
  """Follows an episode by its tokens; returns the state before each sampled token.

  A state is (right calls, other calls, tokens of this turn, kind of its first token, is the rest right so far). Right
  is the call that the expert would make, and the solution.
  """
  states, right, wrong, solution = [], 0, 0, None
  for shown, action in turns_of(token_ids, action_mask):
    if solution is None:
      question = tokenizer.decode_bytes(shown[2:-2])  # between its turn markers
      operands, operators = arithmetic.parse_question(question)
      solution = str(arithmetic.solve(question))
    index = arithmetic.next_operation(operators) if operators else 0
    call = f"{operands[index]}{operators[index]}{operands[index + 1]}" if operators else None

    # An action says its kind first, and then a text that begins as the right one or does not.
    expected = {tokenizer.tool_call_id: call, tokenizer.answer_id: solution}
    for place in range(len(action)):
      kind, text = (int(action[0]), tokenizer.decode_bytes(action[1:place])) if place else (None, "")
      wanted = expected.get(kind)
      states.append((right, wrong, place, kind, text is not None and wanted is not None and wanted.startswith(text)))

    # A right call leaves a shorter question.
    if call is not None and tokenizer.decode(action) == f"<|tool_call|>{call}<|end|>":
      operands, operators = arithmetic.reduce(operands, operators, index, arithmetic.evaluate_call(call))
      right += 1
    else:
      wrong += 1
  return states
