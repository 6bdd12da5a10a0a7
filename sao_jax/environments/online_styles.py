"""Online learning: what is rewarded changes during the run, and the policy has to follow.

    <|bos|><|user|>3+4 in roman or words<|end|><|assistant|>     prompt: a sum, and the styles it may be written in
    <|answer|>words:seven<|end|>                                 action, ends the episode

The reward is quality times style: 1 or 0 for the right number, times 1 for the style that is wanted in this phase of
the run, `others` for another one that was offered, and 0 for one that was not. Nobody tells the policy what is wanted.

The phase is the pass over the training prompts, which is the epoch in a prompt's key: it depends on the place of the
prompt in the order alone, and so goes on exactly from a checkpoint, and is the same for all processes. The policy's
version would not do, as nobody knows it before an episode has ended. With `phase_prompts` of 80 batches the style
changes about every 80 updates; rollouts of both phases are under way for a few updates then.

Prompts offer one, two or all three styles, in any order, so that every style is rewarded somewhere in every phase: with
`alone` of 1 a style that is offered alone as much as the wanted one, which keeps all of them alive if there are enough
such prompts (`single`).
Answers name their style first: the choice is made at one place, where a preference among two is one among all three.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.answers import byte_answer, byte_episode, encode_question
from sao_jax.environments.base import Demonstration, Environment, StepResult
from sao_jax.environments.token_turns import turns_of
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_grader import AnswerGrader
from sao_jax.rewards.composition import quality_times_style

STYLES = ("digits", "words", "roman")
ONES = (
  *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
  *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ROMAN = ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
FORMS = {"digits": r"[0-9]+", "words": r"[a-z]+(?: [a-z]+)?", "roman": r"[IVXLC]+"}
WANTED = "The answer is a number. It is to be written in this style: {}. Judge the style alone, not the number."
MAX_DRAWS = 1000


@dataclasses.dataclass(frozen=True)
class OnlineStyles:
  """Settings of the task."""

  name: str = "online_styles"
  max_operand: int = 9
  wanted: tuple[str, ...] = STYLES  # the style of each phase; the last one goes on
  phase_prompts: int = 3840  # training prompts of a phase, in which questions repeat
  others: float = 0.2  # style factor of an offered style that is not wanted
  alone: float | None = None  # that of one that is offered alone; None: as others
  single: float | None = (
    None  # share of training prompts that offer one style; None: a third, as those of two and three
  )
  judge: AnswerGrader | None = None  # such as an LLMJudge, which gives the style factor; None: the wanted style is 1
  demonstration_noise: float = 0.3  # chance that a demonstration has another number

  def __post_init__(self):
    checks = (
      ("max_operand", 2 <= self.max_operand <= 49, "between 2 and 49"),
      ("wanted", bool(self.wanted) and set(self.wanted) <= {*STYLES}, f"one or more of {', '.join(STYLES)}"),
      ("phase_prompts", self.phase_prompts >= 1, "at least 1"),
      ("others", 0.0 <= self.others < 1.0, "at least 0, and less than 1"),
      ("alone", self.alone is None or 0.0 <= self.alone <= 1.0, "0 to 1, or None"),
      ("single", self.single is None or 0.0 <= self.single <= 1.0, "0 to 1, or None"),
      ("demonstration_noise", 0.0 <= self.demonstration_noise <= 1.0, "between 0 and 1"),
    )
    for name, valid, wanted in checks:
      if not valid:
        raise ConfigError(f"environment.{name}", f"{getattr(self, name)!r} cannot work.", f"Use {wanted}.")

  def tokenizer(self) -> ByteTokenizer:
    return ByteTokenizer()

  def make(self, tokenizer: ByteTokenizer) -> StylesEpisode:
    return StylesEpisode(self, tokenizer)

  def prompts(self, tokenizer: ByteTokenizer, split: str, seed: int) -> Sequence[Prompt]:
    if self.judge is not None:
      self.judge.check()
    return HeldoutSums(self, seed) if check_split(split) == "heldout" else TrainingSums(self, seed)

  def phase(self, key: PromptKey) -> int:
    """Returns the number of a training prompt's phase."""
    return min(key.epoch, len(self.wanted) - 1)

  def demonstration(self, prompt: Prompt, tokenizer: ByteTokenizer, rng: np.random.Generator) -> Demonstration:
    """Writes the sum, or sometimes another number, in any of the styles that are offered."""
    value, style = solve(prompt), str(rng.choice(prompt.data["offered"]))
    if rng.random() < self.demonstration_noise:
      value += int(rng.choice([-2, -1, 1, 2]))
    said = write_answer(max(value, 1), style)
    quality, factor = self.judged(prompt, said)
    return byte_episode(tokenizer, pose(prompt), said, quality * factor)

  def states(self, token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]) -> list[Hashable]:
    """Tells the task's state before every sampled token of an episode: see `states_of`."""
    return states_of(self.tokenizer(), token_ids, action_mask)

  def judged(self, prompt: Prompt, said: str | None) -> tuple[float, float]:
    """Returns quality and style factor of an answer, as the program judges them."""
    style = style_of(said)
    quality = float(style is not None and said == write_answer(solve(prompt), style))
    if style not in prompt.data["offered"]:
      return quality, 0.0
    wanted = self.wanted[self.phase(prompt.key)]
    if style == wanted or not prompt.data["by_phase"]:
      return quality, 1.0
    return quality, self.alone if self.alone is not None and len(prompt.data["offered"]) == 1 else self.others


class TrainingSums(Sequence[Prompt]):
  """Training prompts by index: the first sum of the training split among the draws (seed, index, 0), ..."""

  def __init__(self, settings: OnlineStyles, seed: int):
    self._settings, self._seed = settings, seed

  def __len__(self) -> int:
    return self._settings.phase_prompts

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    for draw in range(MAX_DRAWS):
      rng = np.random.default_rng((self._seed, int(index), draw))
      question = "{}+{}".format(*rng.integers(1, self._settings.max_operand + 1, 2))
      if split_of(question) == "train":
        order, size = rng.permutation(STYLES), rng.integers(1, len(STYLES) + 1)
        if self._settings.single is not None:
          size = 1 if rng.random() < self._settings.single else rng.integers(2, len(STYLES) + 1)
        offered = order[:size].tolist()
        data = {"question": question, "offered": offered, "by_phase": True}
        return Prompt(PromptKey(self._settings.name, int(index), 0), data)
    raise _too_few(self._settings)


class HeldoutSums(Sequence[Prompt]):
  """All sums of the held-out split with all that can be offered, once; any style that is offered is a success there."""

  def __init__(self, settings: OnlineStyles, seed: int):
    numbers = range(1, settings.max_operand + 1)
    sums = [question for a in numbers for b in numbers if split_of(question := f"{a}+{b}") == "heldout"]
    if not sums:
      raise _too_few(settings)
    orders = [order for size in range(1, len(STYLES) + 1) for order in itertools.permutations(STYLES, size)]
    pairs = list(itertools.product(sums, orders))
    order = np.random.default_rng(seed).permutation(len(pairs))
    self._name, self._pairs = settings.name, [pairs[place] for place in order]

  def __len__(self) -> int:
    return len(self._pairs)

  def __getitem__(self, index: int) -> Prompt:
    question, offered = self._pairs[index]
    data = {"question": question, "offered": [*offered], "by_phase": False}
    return Prompt(PromptKey(self._name, int(index), 0), data)


class StylesEpisode(Environment):
  """One question, one answer."""

  def __init__(self, settings: OnlineStyles, tokenizer: ByteTokenizer):
    self.name, self.stop_ids = settings.name, (tokenizer.end_id,)
    self._settings, self._tokenizer = settings, tokenizer

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._prompt = prompt
    return encode_question(self._tokenizer, pose(prompt))

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    settings, prompt = self._settings, self._prompt
    # The program judges.
    said = byte_answer(self._tokenizer, action_ids)
    quality, factor = settings.judged(prompt, said)
    wanted, facts = settings.wanted[settings.phase(prompt.key)], {}

    # A judge decides about styles that are offered; what is not offered earns nothing from anybody.
    if settings.judge is not None and factor and prompt.data["by_phase"]:
      criterion = WANTED.format(wanted)
      factor, facts = await settings.judge.grade(self.name, pose(prompt), said, criterion)
    reward, parts = quality_times_style(quality, factor, self.name)

    # The share of each style shows every switch, and success the recovery.
    style = style_of(said)
    info = {f"style_{name}": float(name == style) for name in STYLES} | parts | facts
    if prompt.data["by_phase"]:
      info["phase"] = float(settings.phase(prompt.key))
      if wanted in prompt.data["offered"]:
        info["success"] = quality * (style == wanted)
    return StepResult(np.zeros(0, dtype=np.int32), True, reward, info)


def pose(prompt: Prompt) -> str:
  """Writes the question with the styles that are offered."""
  return f"{prompt.data['question']} in {' or '.join(prompt.data['offered'])}"


def solve(prompt: Prompt) -> int:
  """Returns the sum."""
  return sum(map(int, prompt.data["question"].split("+")))


def style_of(said: str | None) -> str | None:
  """Tells the style of an answer; None for one that is of no style, or not of that which it names."""
  style, _, number = (said or "").partition(":")
  return style if style in FORMS and re.fullmatch(FORMS[style], number) else None


def write_answer(value: int, style: str) -> str:
  """Writes a number behind the name of its style."""
  return f"{style}:{write_number(value, style)}"


def write_number(value: int, style: str) -> str:
  """Writes a number from 1 to 99 in a style.

  >>> [write_number(49, style) for style in STYLES]
  ['49', 'forty nine', 'XLIX']
  """
  if style == "digits":
    return str(value)
  if style == "words":
    tens, ones = divmod(value, 10)
    return ONES[value] if value < len(ONES) else " ".join([TENS[tens - 2], *([ONES[ones]] if ones else [])])
  letters = ""
  for size, sign in ROMAN:
    letters += sign * (value // size)
    value %= size
  return letters


def states_of(
  tokenizer: ByteTokenizer, token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]
) -> list[Hashable]:
  """Follows an episode by its tokens; returns the state before each sampled token.

  A state is (styles that are offered, the answer's style once it is named, does it go on as the right number so far).
  """
  states = []
  for shown, action in turns_of(token_ids, action_mask):
    question, _, offers = (tokenizer.decode_bytes(shown[2:-2]) or "").partition(" in ")
    right, offered = sum(map(int, question.split("+"))), frozenset(offers.split(" or "))
    for place in range(len(action)):
      said = tokenizer.decode_bytes(action[1:place]) if place and action[0] == tokenizer.answer_id else None
      style, named, _ = (said or "").partition(":")
      style = style if named and style in FORMS else None
      begun = said is not None and any(write_answer(right, each).startswith(said) for each in STYLES)
      states.append((offered, style, place == 0 or begun))
  return states


def _too_few(settings: OnlineStyles) -> Any:
  remedy = "Raise max_operand."
  return ConfigError("environment.max_operand", f"{settings.max_operand} makes too few different sums.", remedy)
