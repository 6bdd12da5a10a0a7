"""What one item of a data set can do to a run: it is skipped and counted; nothing but such items ends the run."""

from __future__ import annotations

import concurrent.futures
import datetime
import time

import numpy as np
import pytest
from toys.rollout_fakes import (
  CONTEXT_LENGTH,
  FakeEnvironment,
  FakePrompts,
  FakeSampler,
  Running,
  make_loop,
  prompt,
  train,
)

from sao_jax.checkpoints.host_state import decode, encode
from sao_jax.episode import BadPrompt, Prompt, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.rollout import bad_prompts
from sao_jax.rollout.outcomes import NothingButBadPrompts, check_identity


class Lengths(FakeEnvironment):
  """Every fifth prompt is too long, by one token or by many; every other fifth has no token."""

  async def reset(self, prompt):
    self.prompt_length = {0: CONTEXT_LENGTH + 7 * (prompt.key.id % 2), 1: 0}.get(prompt.key.id % 5, 4)
    return await super().reset(prompt)


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_that_nobody_can_attempt_are_skipped_and_counted(group_size, deterministic, caplog):
  sampler = Rounds() if deterministic else FakeSampler()
  config = {"group_size": group_size, "deterministic": deterministic}
  loop = make_loop(Lengths, sampler, batch_size=8, admission_staleness=0, **config)
  with Running(loop):
    version = 0
    for _ in range(4):
      batch = loop.buffer.take(8, version, timeout=20)
      assert all(trajectory.key.id % 5 > 1 for trajectory in batch)
      loop.wait_until_idle(20)
      sampler.version = version = version + 1
      loop.on_version(version)
    loop.wait_until_idle(20)
    stats = loop.stats()
  check_identity(stats)
  assert stats["trained"] == 32 and loop.error is None
  own = [count for reason, count in stats.items() if reason.startswith("skipped_prompt/") and "group" not in reason]
  assert stats["skipped_prompt"] == group_size * sum(own) > 0
  assert stats["skipped_prompt/prompt_too_long"] > 0 and stats["skipped_prompt/prompt_empty"] > 0
  assert not stats["failed_environment"]  # it is nobody's failure
  (said,) = [record.message for record in caplog.records if "('fake', 0, 0)" in record.message]
  assert f"{CONTEXT_LENGTH} tokens" in said and "sampler.context_length" in said


class Rounds(FakeSampler):
  """The fake sampler, in rounds."""

  def submit_all(self, requests):
    futures = []
    for request in requests:
      futures.append(concurrent.futures.Future())
      futures[-1].set_result(self.answer(request))
    return futures


def test_each_prompt_is_said_once_and_not_in_every_epoch(caplog):
  bad = bad_prompts.BadPrompts()
  for epoch in range(3):
    for number in range(2 * bad_prompts.SAID):
      bad.skip(BadPrompt("prompts", f"number {number} is bad", "mend it"), PromptKey("fake", number, epoch))
      bad.good()
  said = [record.message for record in caplog.records]
  assert len(said) == bad_prompts.SAID == len(set(said)) and said[-1].endswith("Further ones are only counted.")
  assert bad.count == 6 * bad_prompts.SAID


def test_nothing_but_bad_prompts_ends_the_run_with_the_remedy():
  loop = make_loop(lambda: FakeEnvironment(prompt=CONTEXT_LENGTH))
  with Running(loop):
    with pytest.raises(NothingButBadPrompts, match=f"{bad_prompts.IN_A_ROW} prompts in a row.* 64 tokens") as error:
      loop.buffer.take(4, 0, timeout=20)
    with pytest.raises(ConfigError):
      loop.check()
  assert isinstance(error.value, ConfigError) and error.value.field == "sampler.context_length"
  assert loop.stats()["skipped_prompt"] >= bad_prompts.IN_A_ROW
  check_identity(loop.stats())


def test_one_good_prompt_in_a_hundred_is_enough():
  class Rare(FakeEnvironment):
    async def reset(self, prompt):
      self.prompt_length = 4 if prompt.key.id % 100 == 99 else CONTEXT_LENGTH
      return await super().reset(prompt)

  sampler = FakeSampler()
  with Running(make_loop(Rare, sampler)) as loop:
    train(loop, sampler, 3)
    assert loop.stats()["skipped_prompt"] > 900


UNSTORABLE = {
  "a date": {"when": datetime.datetime(2026, 1, 2)},
  "a tuple": {"rows": [{"size": (3, 4)}]},
  "whole-number keys": {3: "three"},
  "an array": {"array": np.arange(3)},
  "no number": {"score": float("nan")},
}


@pytest.mark.parametrize("data", UNSTORABLE.values(), ids=UNSTORABLE)
def test_a_prompt_that_no_checkpoint_could_hold_is_skipped_when_it_is_drawn(data, caplog):
  class Prompts(FakePrompts):
    def __next__(self):
      drawn = super().__next__()
      return Prompt(drawn.key, data) if drawn.key.id % 3 == 1 else drawn

  sampler = FakeSampler(delay=lambda rollout_id: 0.001)
  with Running(make_loop(sampler=sampler, prompts=Prompts())) as loop:
    for _ in range(3):
      train(loop, sampler, 1, version=sampler.version)
      encode(list(loop.state_dict()))  # whatever is under way can be saved
    stats = loop.stats()
  assert stats["skipped_prompt"] == stats["skipped_prompt/prompt_unstorable"] > 3
  message = next(record.message for record in caplog.records)
  assert "('fake', 1, 0)" in message and "data" in message


def test_a_source_may_say_that_an_item_is_damaged():
  class Prompts(FakePrompts):
    def __next__(self):
      drawn = super().__next__()
      if drawn.key.id % 2:
        raise BadPrompt("prompts", f"row {drawn.key.id} has no question", "drop it", reason="no_question")
      return drawn

  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, prompts=Prompts())) as loop:
    train(loop, sampler, 3)
    assert loop.stats()["skipped_prompt/no_question"] >= 11


def test_what_an_environment_keeps_in_its_prompt_reaches_no_checkpoint_and_no_other_attempt():
  seen = []

  class Keeps(FakeEnvironment):
    async def reset(self, prompt):
      seen.append(dict(prompt.data))
      prompt.data["when"] = datetime.datetime(2026, 1, 2)
      if len(seen) == 1:
        raise ConnectionResetError
      return await super().reset(prompt)

  loop = make_loop(Keeps, FakeSampler(delay=lambda rollout_id: 3600.0), slots=2, environment_retries=1)
  with Running(loop):
    while len(seen) < 3:
      time.sleep(0.001)
    state = decode(encode(list(loop.state_dict())))
  assert all(data == {"question": f"number {number}"} for number, _, data in state[0]["intake"]["unfinished"])
  assert all(set(data) == {"question"} for data in seen)


def test_a_run_that_had_stopped_on_a_prompt_goes_on_behind_it():
  """The state of such a run has the prompt in flight."""
  loop = make_loop(lambda: FakeEnvironment(prompt=CONTEXT_LENGTH), FakeSampler())
  loop.ledger.start(loop._prompts)
  state, arrays = loop.state_dict()
  assert [number for number, _, _ in state["intake"]["unfinished"]] == [0]

  def make():
    made.append(None)
    return FakeEnvironment(prompt=CONTEXT_LENGTH if len(made) == 1 else 4)

  made, sampler = [], FakeSampler()
  resumed = make_loop(make, sampler, slots=1)
  resumed.load_state_dict(state, arrays)
  with Running(resumed):
    train(resumed, sampler, 2)
    assert resumed.stats()["skipped_prompt"] == 1


def test_a_counter_that_an_older_state_lacks_begins_at_0():
  loop = make_loop()
  state, arrays = loop.state_dict()
  state["buffer"]["admission"]["outcomes"].pop("skipped_prompt", None)
  loop.load_state_dict(state, arrays)
  assert loop.stats()["skipped_prompt"] == 0


def test_equal_keys_are_different_rollouts():
  class Same(FakePrompts):
    def __next__(self):
      super().__next__()
      return prompt(7)

  sampler = FakeSampler()
  with Running(make_loop(sampler=sampler, prompts=Same())) as loop:
    train(loop, sampler, 3, inspect=lambda batch, _: {trajectory.key.id for trajectory in batch} == {7})
    assert loop.stats()["trained"] == 12


def test_text_that_a_tokenizer_refuses_and_a_grader_that_fails_on_one_answer_cost_their_rollouts():
  class Picky(FakeEnvironment):
    async def reset(self, prompt):
      if prompt.key.id % 4 == 1:
        "\ud83d".encode()
      return await super().reset(prompt)

    async def step(self, action_ids):
      result = await super().step(action_ids)
      if result.done and self.prompt.key.id % 4 == 2:
        raise ValueError("no number in the answer")
      return result

    async def on_truncated(self, status: Status) -> float:
      return float("inf")

  sampler = FakeSampler()
  with Running(make_loop(Picky, sampler)) as loop:
    train(loop, sampler, 3)
    stats = loop.stats()
  assert stats["failed_environment/UnexpectedFailure(UnicodeEncodeError)"] > 1
  assert stats["failed_environment/UnexpectedFailure(ValueError)"] > 1
