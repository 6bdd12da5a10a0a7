"""Several environments in one run: who plays, what is scaled, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle

import numpy as np
import pytest
from toys import training_toy

from sao_jax.config import MODEL_CHECKPOINT
from sao_jax.configuration.rebuild import is_faithful
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import DemonstratingSpec, Demonstration, Environment, EnvironmentSpec, StepResult
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.episode import BadPrompt, GraderFailure, Prompt, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.huggingface.pretrained import with_folder_shape

TOKENIZER = ByteTokenizer()


class Episode(Environment):
  """Rewards 0.5 and 1, or what the prompt says; 0.25 when it is cut."""

  stop_ids = (7,)

  def __init__(self, settings):
    self.name, self.steps, self.settings = settings.name, 0, settings

  async def reset(self, prompt):
    self.data = prompt.data
    return np.array([1, len(self.name)], np.int32)

  async def step(self, action_ids):
    self.steps += 1
    if self.steps == 1:
      return StepResult([3], False, self.data.get("early"), {"style": 0.5})
    return StepResult([], True, self.data.get("late", 1.0))

  async def on_truncated(self, status):
    return 0.25

  async def close(self):
    self.settings.closed.append(self.name)


@dataclasses.dataclass(frozen=True)
class Task:
  name: str
  size: int = 3
  closed = []

  def tokenizer(self):
    return ByteTokenizer()

  def make(self, tokenizer):
    return Episode(self)

  def prompts(self, tokenizer, split, seed):
    size = self.size if split == "train" else self.size + 1
    return [Prompt(PromptKey(self.name, number, 0), {"number": number}) for number in range(size)]


class Shown(Task):
  def demonstration(self, prompt, tokenizer, rng):
    mask = np.array([False, True, True])
    return Demonstration(np.array([1, 2, 7]), mask, float(prompt.data["number"]), np.array([prompt.data["number"]]))


MIXTURE = Mixture((Part(Task("a"), 2, reward_scale=3.0), Part(Task("bb", 2), 1), Part(Task("c", 2), 0)))


def play(mixture, prompt, steps=2):
  """(what reset returned, the results, the grade of a cut episode)."""

  async def episode():
    environment = mixture.make(TOKENIZER)
    ids = await environment.reset(prompt)
    results = [await environment.step(np.array([7])) for _ in range(steps)]
    cut = await environment.on_truncated(Status.TRUNCATED_TURNS)
    await environment.close()
    return environment, ids.tolist(), results, cut

  return asyncio.run(episode())


def of(name, split, **data):
  prompts = MIXTURE.prompts(TOKENIZER, split, 0)
  prompt = next(prompts[index] for index in range(len(prompts)) if prompts[index].key.environment == name)
  return dataclasses.replace(prompt, data=prompt.data | {"data": prompt.data["data"] | data})


def test_the_key_names_who_plays_and_only_training_scales_rewards():
  assert isinstance(MIXTURE, EnvironmentSpec)
  environment, ids, (first, last), cut = play(MIXTURE, of("a", "train", early=0.5))
  assert (environment.name, ids, environment.stop_ids) == ("a", [1, 1], (7,))
  assert (first.reward, last.reward, cut, first.info) == (1.5, 3.0, 0.75, {"style": 0.5})
  _, ids, (first, last), cut = play(MIXTURE, of("bb", "train"))
  assert (ids, first.reward, last.reward, cut) == ([1, 2], None, 1.0, 0.25)
  _, _, (first, last), cut = play(MIXTURE, of("a", "heldout", early=0.5))
  assert (first.reward, last.reward, cut) == (0.5, 1.0, 0.25)
  assert Task.closed[-3:] == ["a", "bb", "a"]


@pytest.mark.parametrize("reward", [float("nan"), "1", True])
def test_what_is_no_reward_is_no_reward_when_it_is_scaled(reward):
  with pytest.raises(GraderFailure):
    play(MIXTURE, of("a", "train", late=reward))


def test_weights_choose_what_is_trained_on_and_every_heldout_set_is_evaluated():
  train, heldout = (MIXTURE.prompts(TOKENIZER, split, 0) for split in ("train", "heldout"))
  assert [source[0].key.environment for source in train.sources] == ["a", "bb"] and train.weights == (2, 1)
  assert [heldout[index].key.environment for index in range(len(heldout))] == ["a", "bb", "c"] * 3 + ["a"]


def test_a_prompt_of_another_run_is_skipped():
  with pytest.raises(BadPrompt, match="was not made by a mixture"):
    play(MIXTURE, Prompt(PromptKey("a", 0, 0), {"number": 0}))


def test_it_shows_what_its_parts_show_with_scaled_rewards():
  assert not hasattr(MIXTURE, "demonstration")
  shown = Mixture((Part(Shown("a"), reward_scale=2.0), Part(Task("b"), weight=0)))
  assert isinstance(shown, DemonstratingSpec)
  prompts = shown.prompts(TOKENIZER, "train", 0)
  demonstration = shown.demonstration(prompts[2], TOKENIZER, np.random.default_rng(0))
  assert demonstration.reward == 4.0 and demonstration.turn_rewards.tolist() == [4.0]


def test_wrappers_go_around_a_part_or_around_all():
  inside = Mixture((Part(SimulatedLatency(Task("a"), 0.0, 0.0), reward_scale=2.0),))
  for mixture in (inside, SimulatedLatency(Mixture((Part(Task("a"), reward_scale=2.0),)), 0.0, 0.0)):
    prompt = mixture.prompts(TOKENIZER, "train", 0)[1]
    assert play(mixture, prompt)[2][-1].reward == 2.0 and prompt.key == ("a", 1, 0)


class OtherTokenizer(ByteTokenizer):
  def encode(self, text):
    return super().encode(text)[::-1]


@dataclasses.dataclass(frozen=True)
class OtherTask(Task):
  def tokenizer(self):
    return OtherTokenizer()


@pytest.mark.parametrize(
  "parts, found",
  [
    ((Part(Task("a")), Part(Task("a"))), r"several environments with the name \['a'\]"),
    ((Part(Task("a"), weight=-1),), "parts.0.weight"),
    ((Part(Task("a"), weight=0.5),), "parts.0.weight"),
    ((Part(Task("a")), Part(Task("b"), reward_scale=0.0)), "parts.1.reward_scale"),
    ((Part(Task("a"), weight=0),), "add up to 0"),
    ((), "add up to 0"),
    ((Part(Task("a")), Part(OtherTask("b"))), "'a' and 'b' have different tokenizers"),
    ((Part(Task("a")), Part(Task("b", size=0))), "'b' has no training prompts"),
  ],
)
def test_mixtures_that_cannot_work_are_refused_by_name(parts, found):
  with pytest.raises(ConfigError, match=found):
    mixture = Mixture(parts)
    mixture.prompts(mixture.tokenizer(), "train", 0)


def test_it_is_configuration_like_any_other_environment(tmp_path):
  mixture = Mixture((Part(Task("a"), 2), Part(Task("b"), reward_scale=0.5)))
  mixture.tokenizer()
  assert pickle.loads(pickle.dumps(mixture)) == mixture
  config = dataclasses.replace(training_toy.get_config(), environment=mixture)
  assert is_faithful(config)

  # The tokenizer of the model's folder is wanted in a part, and there is no folder.
  chat = Mixture((Part(QuestionAnswer("x.jsonl", tokenizer_folder=MODEL_CHECKPOINT)),))
  with pytest.raises(ConfigError, match="environment.parts.0.environment.tokenizer_folder"):
    with_folder_shape(dataclasses.replace(config, environment=chat))
