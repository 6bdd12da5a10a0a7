"""Questions of any data set, one turn each: a question is posed, the answer is compared with the right one.

    system prompt, question         a chat, with a tokenizer folder
    thinking <answer>42</answer>    one action, which ends the episode

With the built-in tokenizer the question stands between its turn markers, and the answer behind the last <|answer|>.
Scorers read what a policy wrote, so they run in processes that are killed when they take too long.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.messages import read_messages, text_of, with_instruction
from sao_jax.chat.template import Message
from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.records import RecordPrompts
from sao_jax.data.tfds_source import TFDSPrompts
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
from sao_jax.environments.grading import Grading, check_scorer
from sao_jax.episode import BadPrompt, Prompt, PromptKey
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_grader import AnswerGrader
from sao_jax.rewards.answer_text import without_thinking
from sao_jax.settings import Reopened

Question = str | list[Message]  # a text, or a conversation that ends with a user's message
TFDS = "tfds:"  # before the name of a TensorFlow data set


@dataclasses.dataclass(frozen=True)
class QuestionAnswer(Reopened):
  """Settings: the data set, the fields of its records, the form of the answer, and its scorer."""

  data: str  # a file or folder (sao_jax/data/records.py), gs:// too, or "tfds:NAME"
  name: str = "question_answer"  # in prompt keys and metrics
  question: str = "question"  # field of the records; a dot leads into a field: "extra_info.question"
  answer: str = "answer"  # field with the right answer, any JSON value that the scorer takes
  split: str = ""  # of data that has several
  heldout_data: str = ""  # a data set of its own for evaluation; "": of `data`
  heldout_split: str = ""  # its split; without either, a tenth of all questions is held out, by their hash
  tfds_folder: str = ""  # of prepared TensorFlow data sets; "": where that package keeps them
  system_prompt: str | None = None  # of a chat; None: asks for the tags, if answers stand in tags
  answer_in: Literal["tags", "reply"] = "tags"  # between <answer> and </answer>, or all that is said after thinking
  scorer: str | AnswerGrader = "text"  # a name of sao_jax/rewards/scorers.py, "module:function", or such as an LLMJudge
  tokenizer_folder: str = ""  # a Hugging Face folder, or MODEL_CHECKPOINT, for a chat; "": the byte tokenizer
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as enable_thinking
  grader_processes: int = 2
  grader_timeout: float = 10.0  # seconds for one score; a scorer that takes longer has not graded

  def __post_init__(self):
    check_scorer(self.scorer)
    if self.answer_in not in ("tags", "reply"):
      raise ConfigError("environment.answer_in", f"{self.answer_in!r} is no place.", 'Use "tags" or "reply".')
    if self.system_prompt and not self.is_chat:
      remedy = "Name a tokenizer_folder, or leave it None."
      raise ConfigError("environment.system_prompt", "The byte tokenizer has no system role.", remedy)

  @functools.cached_property
  def grading(self) -> Grading:
    """Scores the answers."""
    return Grading(self.name, self.scorer, processes=self.grader_processes, timeout=self.grader_timeout)

  @property
  def is_chat(self) -> bool:
    """Tells if questions are posed by messages."""
    return bool(self.tokenizer_folder)

  @property
  def fields(self) -> dict[str, str]:
    """The fields of a record by the names that `Prompt.data` has for them."""
    return {"question": self.question, "answer": self.answer}

  @property
  def instruction(self) -> str:
    """The system prompt of a chat, "" for none."""
    if self.system_prompt is not None:
      return self.system_prompt
    return INSTRUCTION if self.answer_in == "tags" else ""

  @functools.cached_property
  def renderer(self) -> ChatRenderer:
    """The tokenizer and template of chats."""
    return ChatRenderer.of(self.tokenizer_folder, self.template_options)

  @functools.cached_property
  def _splits(self) -> dict[str, Questions]:
    """The questions of both splits; without a held-out set the questions of `data` are read once, for their hashes."""
    source, chat = _open(self, self.data, self.split), self.is_chat
    if self.heldout_data or self.heldout_split:
      heldout = _open(self, self.heldout_data or self.data, self.heldout_split)
      return {"train": Questions(source, chat=chat), "heldout": Questions(heldout, chat=chat)}
    chosen = {split: array.array("Q") for split in ("train", "heldout")}
    for index in range(len(source)):
      chosen[_split_of(source, index)].append(index)
    return {split: Questions(source, indices, chat=chat) for split, indices in chosen.items()}

  def tokenizer(self) -> Tokenizer:
    return self.renderer.tokenizer if self.tokenizer_folder else ByteTokenizer()

  def make(self, tokenizer: Tokenizer) -> Environment:
    return ChatEpisode(self) if self.tokenizer_folder else ByteEpisode(self, tokenizer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    if not isinstance(self.scorer, str):
      self.scorer.check()
    return self._splits[check_split(split)]

  def messages(self, question: Question) -> list[Message]:
    """Writes the conversation before the answer; a system prompt goes behind that of the question, if it has one."""
    asked = [{"role": "user", "content": question}] if isinstance(question, str) else read_messages(question)
    return with_instruction(asked, self.instruction)

  def demonstration(self, prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
    """Says the right answer at once."""
    answer, reward = self.grading.demonstrate(prompt)
    question, tags = prompt.data["question"], self.answer_in == "tags"
    if self.tokenizer_folder:
      said = f"<answer>{answer}</answer>" if tags else answer
      return chat_episode(self.renderer, self.messages(question), said, reward)
    return byte_episode(tokenizer, text_of(question), answer, reward, marked=tags)


class Questions(Sequence[Prompt]):
  """Prompts of a source, all of them or some, numbered from 0; a question that nobody can pose is refused by name."""

  def __init__(self, source: Sequence[Prompt], chosen: Sequence[int] | None = None, *, chat: bool = True):
    """`chosen`: numbers in the source, None for all; `chat`: whole conversations can be posed."""
    self._source, self._chosen = source, range(len(source)) if chosen is None else chosen
    self._chat = chat

  def __len__(self) -> int:
    return len(self._chosen)

  def __getitem__(self, index: int) -> Prompt:
    """Returns one question.

    Raises:
      BadPrompt: the record is damaged, or what it asks is neither a text nor a conversation.
    """
    if not 0 <= index < len(self):
      raise IndexError(index)
    prompt = self._source[int(self._chosen[index])]
    self._check(prompt)
    return dataclasses.replace(prompt, key=PromptKey(prompt.key.environment, int(index), 0))

  def _check(self, prompt: Prompt) -> None:
    question, problem = prompt.data["question"], ""
    # A text, or a conversation that the tokenizer can write.
    if isinstance(question, str):
      problem = "" if question.strip() else "which is no text"
    else:
      try:
        messages = read_messages(question)
        if not self._chat and [message["role"] for message in messages] != ["user"]:
          problem = "and the byte tokenizer takes one user's message; name a tokenizer_folder"
      except ValueError as error:
        problem = f"which is neither text nor a conversation: {error}"
    if problem:
      asked = f"Record {prompt.key.id} of {prompt.key.environment} asks {question!r:.80}, {problem}"
      raise BadPrompt("environment.question", asked, "Name the field with the question", reason="prompt_not_text")


def _open(settings: QuestionAnswer, data: str, split: str) -> Sequence[Prompt]:
  """Opens a data set as prompts of question and answer."""
  fields = settings.fields
  if data.startswith(TFDS):
    folder = settings.tfds_folder or None
    name = data.removeprefix(TFDS)
    return TFDSPrompts(name, split or "train", environment=settings.name, fields=fields, data_dir=folder)
  return RecordPrompts(data, environment=settings.name, fields=fields, split=split)


def _split_of(source: Sequence[Prompt], index: int) -> str:
  """Returns the split of a question by its hash. One that is damaged is trained on, where it is skipped and counted."""
  try:
    question = source[index].data["question"]
  except BadPrompt:
    return "train"
  return split_of(question if isinstance(question, str) else json.dumps(question))


class ByteEpisode(Environment):
  """One question, one answer, in the tokens of the built-in tokenizer."""

  def __init__(self, settings: QuestionAnswer, tokenizer: ByteTokenizer):
    self.name, self.stop_ids = settings.name, (tokenizer.end_id,)
    self._settings, self._tokenizer = settings, tokenizer

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    await self._settings.grading.check(prompt)
    self._prompt = prompt
    return encode_question(self._tokenizer, text_of(prompt.data["question"]))

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    answer = byte_answer(self._tokenizer, action_ids, marked=self._settings.answer_in == "tags")
    reward, facts = await self._settings.grading.grade(answer, self._prompt)
    return StepResult(np.zeros(0, dtype=np.int32), True, reward, {"answered": float(answer is not None), **facts})


class ChatEpisode(ChatEnvironment):
  """One question, one answer, as a chat."""

  def __init__(self, settings: QuestionAnswer):
    super().__init__(settings.name, settings.renderer)
    self._settings = settings

  async def open(self, prompt: Prompt) -> Sequence[Message]:
    await self._settings.grading.check(prompt)
    self._prompt = prompt
    return self._settings.messages(prompt.data["question"])

  async def respond(self, said: str) -> Reply:
    answer = read_answer(said) if self._settings.answer_in == "tags" else without_thinking(said)
    reward, facts = await self._settings.grading.grade(answer, self._prompt)
    return Reply(done=True, reward=reward, info={"answered": float(answer is not None), **facts})
