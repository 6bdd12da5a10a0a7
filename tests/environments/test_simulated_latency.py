"""Simulated latency: the inner environment, later, by waits that depend on the prompt alone."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import numpy as np
import pytest

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import Environment
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.episode import PromptKey, Status
from sao_jax.errors import ConfigError

TOKENIZER = ByteTokenizer()
SETTINGS = SimulatedLatency(Calculator(), mean=2.0, sigma=1.0)


def play(settings: SimulatedLatency, monkeypatch):
  """(waits, observations) of one episode; nothing really sleeps here, but servers in other threads do."""
  waits, really_sleep, own = [], asyncio.sleep, threading.get_ident()

  async def sleep(seconds):
    if threading.get_ident() == own:
      waits.append(seconds)
    else:
      await really_sleep(seconds)

  monkeypatch.setattr(asyncio, "sleep", sleep)

  async def episode():
    prompt = settings.prompts(TOKENIZER, "train", 0)[3]
    environment = settings.make(TOKENIZER)
    shown = [TOKENIZER.decode(await environment.reset(prompt))]
    for action in ("<|tool_call|>1+2<|end|>", "<|tool_call|>?<|end|>", "<|answer|>0<|end|>"):
      result = await environment.step(TOKENIZER.encode_with_specials(action))
      shown.append(TOKENIZER.decode(result.observation))
    assert result.done
    await environment.close()
    return shown

  return waits, asyncio.run(episode())


def test_every_step_waits_and_nothing_else_changes(monkeypatch):
  waits, shown = play(SETTINGS, monkeypatch)
  assert len(waits) == 3 and len(set(waits)) == 3 and min(waits) > 0
  assert shown[0].startswith("<|bos|><|user|>") and shown[1].startswith("<|observation|>3<|end|>")
  assert play(SETTINGS, monkeypatch) == (waits, shown)
  assert play(SimulatedLatency(Calculator(), mean=2.0, seed=1), monkeypatch)[0] != waits
  assert play(SimulatedLatency(Calculator(), mean=0.0), monkeypatch)[0] == [0.0, 0.0, 0.0]
  assert play(SimulatedLatency(Calculator(), mean=0.5, sigma=0.0), monkeypatch)[0] == [0.5, 0.5, 0.5]


def test_with_a_tick_answers_come_at_its_multiples(monkeypatch):
  """Nothing really waits here, so the clock stands: a wait is the way to the first tick that is not too early."""
  now = 100.3
  real_time, own = asyncio.BaseEventLoop.time, threading.get_ident()
  stand = lambda loop: now if threading.get_ident() == own else real_time(loop)
  monkeypatch.setattr(asyncio.BaseEventLoop, "time", stand)
  (plain, _), (waits, _) = play(SETTINGS, monkeypatch), play(dataclasses.replace(SETTINGS, tick=0.25), monkeypatch)
  for asked, wait in zip(plain, waits, strict=True):
    assert asked <= wait < asked + 0.25 and (now + wait) % 0.25 == pytest.approx(0.0, abs=1e-9)


def test_waits_are_log_normal_with_the_asked_mean_and_sigma():
  settings = SimulatedLatency(Calculator(), mean=2.0, sigma=0.5)
  waits = np.array(
    [settings.draw(settings.delays(PromptKey("calculator", index, epoch))) for index in range(4000) for epoch in (0, 1)]
  )
  assert waits.mean() == pytest.approx(2.0, rel=0.03)
  assert np.log(waits).std() == pytest.approx(0.5, rel=0.03)
  assert len(set(waits)) == len(waits)


def test_rollouts_of_a_prompt_may_each_wait_for_themselves():
  key, alike = PromptKey("calculator", 3, 0), SETTINGS
  apart = SimulatedLatency(Calculator(), mean=2.0, sigma=1.0, alike=False)
  waits = {settings: {settings.draw(settings.delays(key)) for _ in range(8)} for settings in (alike, apart)}
  assert len(waits[alike]) == 1 and len(waits[apart]) == 8


def test_the_rest_is_the_inner_environments():
  inner = SETTINGS.inner
  assert SETTINGS.name == inner.name
  prompt = SETTINGS.prompts(TOKENIZER, "heldout", 1)[0]
  assert prompt == inner.prompts(TOKENIZER, "heldout", 1)[0]
  demonstrations = [spec.demonstration(prompt, TOKENIZER, np.random.default_rng(0)) for spec in (SETTINGS, inner)]
  np.testing.assert_array_equal(*(demonstration.token_ids for demonstration in demonstrations))
  assert SETTINGS.tokenizer().vocab_size == inner.tokenizer().vocab_size
  assert SETTINGS.make(TOKENIZER).stop_ids == inner.make(TOKENIZER).stop_ids


def test_truncation_and_closing_reach_the_inner_environment():
  class Inner(Environment):
    name, stop_ids, closed = "inner", (1,), False

    async def on_truncated(self, status):
      return 0.25

    async def close(self):
      self.closed = True

  class Spec:
    name = "inner"

    def make(self, tokenizer):
      return inner

  inner = Inner()
  environment = SimulatedLatency(Spec()).make(TOKENIZER)
  assert asyncio.run(environment.on_truncated(Status.TRUNCATED_TURNS)) == 0.25
  asyncio.run(environment.close())
  assert inner.closed


@pytest.mark.parametrize(
  "change",
  [
    {"mean": -1.0},
    {"mean": float("inf")},
    {"mean": float("nan")},
    {"sigma": -0.1},
    {"sigma": float("nan")},
    {"tick": -0.1},
  ],
)
def test_settings_that_cannot_work_are_refused(change):
  with pytest.raises(ConfigError) as caught:
    SimulatedLatency(Calculator(), **change)
  assert caught.value.field == f"environment.{next(iter(change))}"
