"""Prompts that nobody can attempt, outside the asynchronous loop: at the start, in an evaluation, in imitation."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime

import numpy as np
import pytest
from toys import training_toy
from toys.rollout_fakes import FakeSampler

from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import BadPrompt, EnvironmentFailure
from sao_jax.errors import ConfigError
from sao_jax.evaluation import heldout
from sao_jax.evaluation.fixed_policy import check_prompts, run_episodes
from sao_jax.rollout.outcomes import EnvironmentDown, NothingButBadPrompts, PromptEmpty, PromptTooLong
from sao_jax.training.sft import Demonstrations


class Service(FakeSampler):
  """The fake sampler as a service."""

  progress = 0


class Lengths(training_toy.ParityEpisode):
  """Prompts with an odd number are too long, and number 2 has no token."""

  async def reset(self, prompt):
    ids = await super().reset(prompt)
    number = prompt.data["number"]
    return np.resize(ids, 40 if number % 2 else 0 if number == 2 else 2)


class Items(list):
  """A list in which one row is damaged."""

  def __getitem__(self, index):
    if index == 4:
      raise BadPrompt("prompts", "row 4 has no question", "drop it", reason="no_question")
    return super().__getitem__(index)


@dataclasses.dataclass(frozen=True)
class Spec(training_toy.Parity):
  make = staticmethod(lambda tokenizer: Lengths())
  data: str = ""

  def prompts(self, tokenizer, split, seed):
    prompts = super().prompts(tokenizer, "train", seed)
    if self.data == "unstorable":
      prompts[5] = dataclasses.replace(prompts[5], data={"number": 5, "when": datetime.date(2026, 1, 2)})
    if self.data == "long":
      prompts = [prompt for prompt in prompts if prompt.data["number"] % 2]
    return Items(prompts) if self.data == "damaged" else prompts


def make_config(**fields):
  return dataclasses.replace(training_toy.get_config(), environment=Spec(**fields))


@pytest.mark.parametrize("data", ["", "damaged"])
def test_the_start_says_what_will_be_skipped_and_goes_on(data, caplog):
  check_prompts(make_config(data=data))
  words = "of the first 16 train prompts will be skipped"
  said = [record.message for record in caplog.records if words in record.message]
  assert len(said) == 1 and said[0].startswith("11" if data else "10")


def test_an_environment_that_fails_to_close_does_not_hide_what_is_wrong_with_its_prompts():
  class Closes(training_toy.ParityEpisode):
    async def reset(self, prompt):
      raise BadPrompt("prompts", "there is no question", "drop it", reason="no_question")

    async def close(self):
      raise EnvironmentFailure("close", "it is gone", retryable=False)

  @dataclasses.dataclass(frozen=True)
  class Settings(training_toy.Parity):
    make = staticmethod(lambda tokenizer: Closes())

  with pytest.raises(BadPrompt, match="there is no question"):
    check_prompts(dataclasses.replace(training_toy.get_config(), environment=Settings()))


def test_the_start_refuses_a_data_set_without_a_single_prompt_that_fits():
  with pytest.raises(PromptTooLong, match="has 40 tokens") as error:
    check_prompts(make_config(data="long"))
  assert error.value.field == "sampler.context_length" and "above 40" in error.value.remedy


def test_the_look_at_the_first_prompts_leaves_them_as_they_are(monkeypatch):
  async def reset(self, prompt):
    prompt.data["state"] = object()
    return np.int32([1, 2])

  monkeypatch.setattr(Lengths, "reset", reset)
  config = make_config()
  source = config.environment.prompts(None, "train", 0)
  monkeypatch.setattr(Spec, "prompts", lambda self, tokenizer, split, seed: source)
  check_prompts(config)
  assert [list(prompt.data) for prompt in source] == [["number"]] * len(source)


@pytest.mark.parametrize(("stop_ids", "problem"), [((10**6,), "stop_ids has ids from 1000000"), (None, "NoneType")])
def test_the_start_refuses_stop_ids_that_no_sampler_could_use(stop_ids, problem, monkeypatch):
  monkeypatch.setattr(Lengths, "stop_ids", stop_ids)
  with pytest.raises(ConfigError, match=problem) as error:
    check_prompts(make_config())
  assert error.value.field == "environment" and "vocab_size" in error.value.remedy


def test_the_start_refuses_data_that_no_checkpoint_could_hold():
  with pytest.raises(BadPrompt, match=r"\('parity', 5, 0\) cannot be stored: data\['when'\] is a date"):
    check_prompts(make_config(data="unstorable"))


def test_an_evaluation_leaves_such_prompts_out_and_says_how_many(monkeypatch):
  monkeypatch.setattr(heldout, "make_service", lambda *_, **__: contextlib.nullcontext(Service(version=3)))
  config = training_toy.replace(make_config(data="damaged"), evaluation={"prompts": 16})
  result = heldout.evaluate(config, {}, 3)
  # Of 0 ... 7, twice: 0, 4 and 6 are good, one 4 is damaged; 2 is empty, the others are too long.
  assert (result.success.trials, result.skipped, result.ungraded) == (5, 11, 0)
  metrics = result.metrics()
  assert (metrics["heldout_trials"], metrics["heldout_skipped"], metrics["heldout_ungraded"]) == (5, 11, 0)
  assert str(result) == f"{result.success}, 11 prompts skipped"


def test_failures_are_told_apart():
  config = make_config()
  prompts = config.environment.prompts(None, "heldout", 0)
  trajectories, failures = run_episodes(config, Service(), prompts[:4], temperature=1.0)
  assert [trajectory.key.id for trajectory in trajectories] == [0]
  assert [type(failure) for failure in failures] == [PromptTooLong, PromptEmpty, PromptTooLong]


def test_an_outage_that_lasts_gives_an_evaluation_up():
  class Away(training_toy.ParityEpisode):
    async def reset(self, prompt):
      raise EnvironmentFailure("parity", "gone")

  @dataclasses.dataclass(frozen=True)
  class Gone(training_toy.Parity):
    make = staticmethod(lambda tokenizer: Away())

  config = dataclasses.replace(training_toy.get_config(), environment=Gone())
  config = training_toy.replace(config, rollout={"outage_seconds": 0.2})
  prompts = config.environment.prompts(None, "heldout", 0)
  trajectories, failures = run_episodes(config, Service(), prompts, temperature=1.0)
  assert not trajectories and len(failures) == 64
  kinds = [type(failure) for failure in failures]
  assert kinds.count(EnvironmentDown) > 20 and kinds.count(EnvironmentFailure) >= 8


def test_an_item_that_its_source_calls_damaged_is_raised_and_the_next_one_follows():
  spec = Spec(data="damaged")
  make = lambda: make_prompt_iterator(spec.prompts(None, "train", 0), seed=0, shuffle=False)
  iterator = make()
  assert [next(iterator).key.id for _ in range(4)] == [0, 1, 2, 3]
  state = iterator.get_state()
  for _ in range(2):
    with pytest.raises(BadPrompt, match="row 4 has no question"):
      next(iterator)
    assert next(iterator).key.id == 5
    iterator = make()
    iterator.set_state(state)  # a resumed run meets it at the same place


def test_an_exception_of_another_kind_is_the_sources_own():
  class Broken(list):
    def __getitem__(self, index):
      raise OSError("disk")

  with pytest.raises(OSError, match="disk"):
    next(make_prompt_iterator(Broken([1, 2]), seed=0))


@dataclasses.dataclass(frozen=True)
class Demonstrating(training_toy.Parity):
  kind: str = ""
  every: int = 3

  def demonstration(self, prompt, tokenizer, rng):
    demonstration = super().demonstration(prompt, tokenizer, rng)
    if prompt.key.id % self.every:
      return demonstration
    if self.kind == "fails":
      raise EnvironmentFailure("parity", "the expert gave up")
    arrays = demonstration.token_ids, demonstration.action_mask
    ids, mask = (np.resize(array, 40 if self.kind == "long" else 8) for array in arrays)
    if self.kind == "ids":
      ids[3] = training_toy.VOCABULARY
    return dataclasses.replace(demonstration, token_ids=ids, action_mask=mask[:5] if self.kind == "mask" else mask)


@pytest.mark.parametrize("kind", ["long", "fails", "ids", "mask"])
def test_a_demonstration_that_cannot_be_imitated_is_skipped(kind, caplog):
  config = dataclasses.replace(training_toy.get_config(), environment=Demonstrating(kind=kind))
  demonstrations = Demonstrations(config)
  batches = [demonstrations.batch() for _ in range(4)]
  assert all(len(batch) == 4 for batch in batches)
  assert all(trajectory.key.id % 3 for batch in batches for trajectory in batch)
  assert demonstrations.bad_prompts.count > 3 and "is skipped" in caplog.records[0].message

  # Where an iterator goes on, the same ones are skipped.
  resumed = Demonstrations(config)
  resumed.batch()
  state = resumed.prompts.get_state()
  again = Demonstrations(config)
  again.prompts.set_state(state)
  assert [t.key for t in again.batch()] == [t.key for t in batches[1]]


def test_nothing_but_such_demonstrations_is_an_error():
  config = dataclasses.replace(training_toy.get_config(), environment=Demonstrating(kind="long", every=1))
  with pytest.raises(NothingButBadPrompts, match="demonstration on prompt .* has 40 tokens") as error:
    Demonstrations(config).batch()
  assert error.value.field == "sampler.context_length"
