"""Any task of the reasoning-gym package as a single-turn environment, with the task's own scorer as the reward.

    <|bos|><|user|>question<|end|><|assistant|>     prompt
    thinking<|answer|>answer<|end|>                 action, ends the episode (thinking is optional)

The answer is the text behind the last answer token; an action without such a token earns 0. Scorers read what a policy
wrote, so they run in processes that are killed when they take too long.

With a tokenizer folder, the question is the user's message of a chat, and the answer stands between <answer> and
</answer>.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.chat.template import Message
from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.tokenizer import ByteTokenizer, Tokenizer
from sao_jax.environments.answers import (
  INSTRUCTION,
  byte_answer,
  byte_episode,
  chat_episode,
  encode_question,
  read_answer,
)
from sao_jax.environments.base import Demonstration, Environment, StepResult
from sao_jax.environments.chat_environment import ChatEnvironment, Reply
from sao_jax.environments.reasoning_gym_tasks import check_task, create_dataset
from sao_jax.episode import GraderFailure, Prompt, PromptKey
from sao_jax.errors import ConfigError
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rewards.scalar import check_reward

MAX_DRAWS = 256  # 0.9 ** 256 = 2e-12: only a task with a handful of questions has none in a split


@dataclasses.dataclass(frozen=True)
class ReasoningGym:
  """Settings: the name of the task and the options to create it with. Needs the extra `envs`."""

  task: str
  task_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # min_terms, max_digits, ...
  num_prompts: int = 10_000  # per epoch and split; questions may repeat within it
  demonstration_noise: float = 0.6  # chance that the answer of a demonstration is wrong
  tokenizer_folder: str = ""  # a Hugging Face folder, or MODEL_CHECKPOINT, for a chat; "": the byte tokenizer
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as enable_thinking
  grader_processes: int = 2
  grader_timeout: float = 10.0  # seconds for one score; a scorer that takes longer has not graded

  def __post_init__(self):
    check_task(self.task, self.task_config)
    if self.num_prompts < 1:
      raise ConfigError("environment.num_prompts", f"{self.num_prompts} prompts are none.", "Use at least 1.")
    if not 0.0 <= self.demonstration_noise <= 1.0:
      raise ConfigError(
        "environment.demonstration_noise", f"{self.demonstration_noise} is no probability.", "Use 0 to 1."
      )
    if self.grader_processes < 1:
      raise ConfigError("environment.grader_processes", f"{self.grader_processes} grade nothing.", "Use at least 1.")
    if not 0.0 < self.grader_timeout < math.inf:
      raise ConfigError(
        "environment.grader_timeout", f"{self.grader_timeout} s is no time-out.", "Use a number of seconds above 0."
      )

  @property
  def name(self) -> str:
    return f"reasoning_gym/{self.task}"

  @functools.cached_property
  def graders(self) -> GraderPool:
    """The processes that score the answers of this task's episodes."""
    return GraderPool(_Scorer(self), processes=self.grader_processes, timeout=self.grader_timeout)

  @functools.cached_property
  def _datasets(self) -> dict[int, Any]:
    return {}

  def dataset(self, seed: int) -> Any:
    """Returns the task's data set for a seed: created once, its entries computed when asked for.

    Raises:
      ConfigError: when the package is missing, there is no such task, or the task refuses `task_config`.
    """
    if seed not in self._datasets:
      self._datasets[seed] = create_dataset(self.task, self.task_config, seed=seed, size=self.num_prompts)
    return self._datasets[seed]

  def entry(self, prompt: Prompt) -> dict[str, Any]:
    """Returns the task's own entry (question, answer, metadata) for a prompt."""
    return self.dataset(prompt.data["seed"])[prompt.data["index"]]

  @functools.cached_property
  def _renderer(self) -> ChatRenderer:
    return ChatRenderer(HFTokenizer(self.tokenizer_folder), options=self.template_options)

  def tokenizer(self) -> Tokenizer:
    return self._renderer.tokenizer if self.tokenizer_folder else ByteTokenizer()

  def make(self, tokenizer: Tokenizer) -> Environment:
    if self.tokenizer_folder:
      return ReasoningGymChatEpisode(self, self._renderer)
    return ReasoningGymEpisode(self, tokenizer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> ReasoningGymPrompts:
    self.dataset(dataset_seed(seed, 0))  # refuses settings that cannot work now, not at the first prompt
    return ReasoningGymPrompts(self, check_split(split), seed)

  def demonstration(self, prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
    """Answers with the task's own answer, one of whose characters is wrong with probability `demonstration_noise`.

    Raises:
      ConfigError: when the task only grades answers and knows none itself.
    """
    entry = self.entry(prompt)
    answer = entry["answer"]
    if not isinstance(answer, str):
      raise ConfigError(
        "environment.task", f"Task {self.task!r} knows no answers to demonstrate.", "Choose another task for SFT."
      )
    if rng.random() < self.demonstration_noise:
      answer = corrupt(answer, rng)

    reward = score(self.dataset(prompt.data["seed"]), entry, answer, self.name)
    if self.tokenizer_folder:
      said = f"<answer>{answer}</answer>"
      return chat_episode(self._renderer, chat_messages(entry["question"]), said, reward)
    return byte_episode(tokenizer, entry["question"], answer, reward)


class ReasoningGymPrompts(Sequence[Prompt]):
  """Questions by index: the first of the index's draws (each from a data set of its own) that is in the split."""

  def __init__(self, settings: ReasoningGym, split: str, seed: int):
    self._settings, self._split, self._seed = settings, split, seed

  def __len__(self) -> int:
    return self._settings.num_prompts

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    index = int(index)
    for draw in range(MAX_DRAWS):
      seed = dataset_seed(self._seed, draw)
      question = self._settings.dataset(seed)[index]["question"]
      if split_of(question) == self._split:
        key = PromptKey(self._settings.name, index, 0)
        return Prompt(key, {"question": question, "seed": seed, "index": index})
    raise ConfigError(
      "environment.task_config",
      f"No {self._split} question among {MAX_DRAWS} of task {self._settings.task!r}: it has too few different ones.",
      "Choose settings with more different questions.",
    )


def dataset_seed(seed: int, draw: int) -> int:
  """Derives the seed of one data set. reasoning-gym seeds entry i with seed + i: neighbouring seeds share entries."""
  return int(np.random.SeedSequence((seed, draw)).generate_state(1, dtype=np.uint32)[0])


def score(dataset: Any, entry: dict[str, Any], answer: str, environment: str) -> float:
  """Scores the answer with the task's own scorer.

  An answer earns 0 when the scorer fails on it (by an exception, or without a finite number) but grades the entry's
  own answer: then it is the agent's text that broke the scorer.

  Raises:
    GraderFailure: when the scorer cannot grade even the entry's own answer, or returns no finite number.
  """
  try:
    return check_reward(dataset.score_answer(answer, entry), environment)
  except Exception as error:
    try:
      check_reward(dataset.score_answer(entry["answer"], entry), environment)
    except Exception:
      raise GraderFailure(environment, f"the scorer failed, {type(error).__name__}: {error}") from error
    return 0.0


class _Scorer:
  """`score` for a worker process. Entries come from the parent, since some depend on the process that made them."""

  def __init__(self, settings: ReasoningGym):
    self._settings = dataclasses.replace(settings)  # a copy without the cached data sets and graders

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._settings.dataset(0)  # imports the package now: the first answer's time-out is not for that

  def __call__(self, seed: int, entry: dict[str, Any], answer: str) -> float:
    return score(self._settings.dataset(seed), entry, answer, self._settings.name)


async def _grade(settings: ReasoningGym, seed: int, entry: dict[str, Any], answer: str | None) -> float:
  """Scores the answer in a worker process; no answer earns 0."""
  return 0.0 if answer is None else await settings.graders.grade(settings.name, seed, entry, answer)


class ReasoningGymEpisode(Environment):
  """One question, one answer. Questions are made in a thread, answers are scored in another process."""

  def __init__(self, settings: ReasoningGym, tokenizer: ByteTokenizer):
    self.name, self.stop_ids = settings.name, (tokenizer.end_id,)
    self._settings, self._tokenizer = settings, tokenizer

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._seed = prompt.data["seed"]
    self._entry = await asyncio.to_thread(self._settings.entry, prompt)
    return encode_question(self._tokenizer, self._entry["question"])

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    answer = byte_answer(self._tokenizer, action_ids)
    reward = await _grade(self._settings, self._seed, self._entry, answer)
    return StepResult(np.zeros(0, dtype=np.int32), True, reward, {"answered": float(answer is not None)})


class ReasoningGymChatEpisode(ChatEnvironment):
  """One question, one answer, as a chat."""

  def __init__(self, settings: ReasoningGym, renderer: ChatRenderer):
    super().__init__(settings.name, renderer)
    self._settings = settings

  async def open(self, prompt: Prompt) -> Sequence[Message]:
    self._seed = prompt.data["seed"]
    self._entry = await asyncio.to_thread(self._settings.entry, prompt)
    return chat_messages(self._entry["question"])

  async def respond(self, said: str) -> Reply:
    answer = read_answer(said)
    reward = await _grade(self._settings, self._seed, self._entry, answer)
    return Reply(done=True, reward=reward, info={"answered": float(answer is not None)})


def chat_messages(question: str) -> list[Message]:
  """Writes the conversation before the answer."""
  return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]


def corrupt(answer: str, rng: np.random.Generator) -> str:
  """Replaces one letter or digit of the answer by another one; returns "" for an answer without any."""
  places = [place for place, character in enumerate(answer) if character.isascii() and character.isalnum()]
  if not places:
    return ""
  place = int(rng.choice(places))
  alphabet = "0123456789" if answer[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
  other = str(rng.choice([character for character in alphabet if character != answer[place].lower()]))
  return answer[:place] + (other.upper() if answer[place].isupper() else other) + answer[place + 1 :]
