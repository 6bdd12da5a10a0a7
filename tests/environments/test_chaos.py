"""Chaos: faults at the rates asked for, the same ones in every run, each ending as the outcome it should have."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time

import pytest
from toys.rollout_fakes import FakeEnvironment, FakePrompts, FakeSampler, Running, make_loop, train
from toys.sampler_fakes import FakeEngine

from sao_jax.config import SamplerConfig
from sao_jax.configuration import config_tree
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import DemonstratingSpec
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.wrappers import Chaos, Fault, FaultPlace
from sao_jax.episode import PromptKey
from sao_jax.errors import ConfigError
from sao_jax.rollout import outages
from sao_jax.rollout.outcomes import Outcome
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService

RATES = {Fault.RAISE: "raises", Fault.HANG: "hangs", Fault.SLOW: "slow", Fault.GARBAGE: "garbage", Fault.KILL: "kills"}
TIMEOUT = "failed_infrastructure/EnvironmentTimeout"
UNKNOWN = "failed_environment/UnexpectedFailure(RuntimeError)"
KILLED = "failed_infrastructure/InfrastructureFailure(ConnectionResetError)"


@dataclasses.dataclass(frozen=True)
class Fake:
  """The settings of the fake environment."""

  turns: int = 2
  name: str = "fake"

  def make(self, tokenizer):
    return FakeEnvironment(turns=self.turns)


def key(number: int, epoch: int = 0) -> PromptKey:
  return PromptKey("fake", number, epoch)


def test_faults_come_at_their_rates_and_depend_on_seed_and_prompt_alone():
  chaos = Chaos(Fake(), raises=0.05, hangs=0.02, slow=0.1, garbage=0.03, kills=0.04, seed=3)
  faults = [chaos.fault(key(number)) for number in range(20_000)]
  counts = collections.Counter(fault[0] for fault in faults if fault)
  for fault, name in RATES.items():
    assert counts[fault] / len(faults) == pytest.approx(getattr(chaos, name), rel=0.15)
  places = collections.Counter(fault[1] for fault in faults if fault)
  assert set(places) == set(FaultPlace) and max(places.values()) < 1.1 * min(places.values())
  assert [chaos.fault(key(number)) for number in reversed(range(100))] == faults[99::-1]
  assert [chaos.fault(key(number, epoch=1)) for number in range(200)] != faults[:200]
  assert [dataclasses.replace(chaos, seed=4).fault(key(number)) for number in range(200)] != faults[:200]
  assert not any(Chaos(Fake()).fault(key(number)) for number in range(1000))
  only_step = Chaos(Fake(), raises=1.0, places=("step",))
  assert {only_step.fault(key(number)) for number in range(100)} == {(Fault.RAISE, FaultPlace.STEP)}


@pytest.mark.parametrize("place", FaultPlace)
@pytest.mark.parametrize(
  "fault, reasons",
  [
    (Fault.RAISE, dict.fromkeys(FaultPlace, UNKNOWN)),
    (Fault.HANG, dict.fromkeys(FaultPlace, TIMEOUT)),
    (Fault.SLOW, dict.fromkeys(FaultPlace)),
    (
      Fault.GARBAGE,
      dict.fromkeys(FaultPlace, "failed_environment/EnvironmentFailure")
      | {FaultPlace.REWARD: "failed_infrastructure/GraderFailure"},
    ),
    (Fault.KILL, dict.fromkeys(FaultPlace, KILLED)),
  ],
)
@pytest.mark.parametrize("turns", [2, 99], ids=["ends", "is cut"])
def test_every_fault_in_every_place_has_its_outcome_and_the_place_comes_back(fault, reasons, place, turns, monkeypatch):
  monkeypatch.setattr(outages, "LONGEST_PAUSE", 0.001)
  chaos = Chaos(Fake(turns), places=(place.value,), slow_seconds=0.05, **{RATES[fault]: 0.4}, seed=1)
  failing = {number for number in range(16) if chaos.fault(key(number)) and fault is not Fault.SLOW}
  assert 4 <= len(failing) <= 8 or fault is Fault.SLOW
  sampler, seen = FakeSampler(), []
  # The time-out must let a process start.
  timeout = 0.1 if fault is Fault.HANG else 10.0
  loop = make_loop(
    lambda: chaos.make(None),
    sampler,
    FakePrompts(16),
    batch_size=1,
    admission_staleness=15,
    environment_timeout=timeout,
    environment_retries=1,
  )
  with Running(loop):
    train(loop, sampler, 16 - len(failing), batch_size=1, inspect=lambda batch, _: seen.append(batch[0].key.id))
    while loop.stats()["in_flight"]:
      time.sleep(0.001)
    stats = loop.stats()
  assert sorted(seen) == sorted(set(range(16)) - failing)  # exactly those that it says
  assert stats["submitted"] == 16 and stats["trained"] == 16 - len(failing)
  if failing:
    assert stats[reasons[place]] == len(failing)
  retried = place is FaultPlace.RESET and fault is Fault.HANG or fault is Fault.KILL
  assert stats["retries"] == (len(failing) if retried else 0)
  assert stats["capacity"] == 16 and not sampler.open


def test_without_a_fault_it_is_the_inner_environment():
  inner, tokenizer = Calculator(), ByteTokenizer()
  chaos = Chaos(inner, kills=0.5, seed=2)
  assert (chaos.name, chaos.tokenizer().vocab_size) == (inner.name, tokenizer.vocab_size)
  assert isinstance(chaos, DemonstratingSpec)
  prompts = chaos.prompts(tokenizer, "train", 0)
  prompt = next(prompt for prompt in (prompts[index] for index in range(50)) if chaos.fault(prompt.key) is None)

  async def play(spec):
    environment = spec.make(tokenizer)
    ids = (await environment.reset(prompt)).tolist()
    for action in ("<|tool_call|>1+2<|end|>", "<|answer|>0<|end|>"):
      result = await environment.step(tokenizer.encode_with_specials(action))
      ids += [*result.observation]
    await environment.close()
    return ids, result.reward, environment.stop_ids

  assert asyncio.run(play(chaos)) == asyncio.run(play(inner))


@pytest.mark.parametrize(
  "change, field",
  [
    ({"raises": -0.1}, "raises"),
    ({"hangs": 1.1}, "hangs"),
    ({"kills": float("nan")}, "kills"),
    ({"raises": 0.6, "garbage": 0.6}, "raises"),
    ({"slow_seconds": float("inf")}, "slow_seconds"),
    ({"slow_seconds": -1.0}, "slow_seconds"),
    ({"places": ()}, "places"),
    ({"places": ("step", "close")}, "places"),
  ],
)
def test_settings_that_cannot_work_are_refused(change, field):
  with pytest.raises(ConfigError) as caught:
    Chaos(Fake(), **change)
  assert caught.value.field == f"environment.{field}"


def test_its_settings_and_those_of_what_it_wraps_can_be_overridden():
  chaos = config_tree.replace(Chaos(Calculator()), {"raises": 0.05, "inner.max_operand": 7, "places": ["step"]})
  assert (chaos.raises, chaos.inner.max_operand, chaos.places) == (0.05, 7, ("step",))
  config_tree.check_types(chaos)


def deterministic_run() -> tuple[list, dict[Outcome, int]]:
  """(what was trained on, what became of all rollouts) of a deterministic run with a sampler thread and all faults."""
  rates = {"raises": 0.1, "hangs": 0.04, "garbage": 0.1, "kills": 0.1, "slow": 0.2}
  chaos = Chaos(Fake(), **rates, slow_seconds=0.01, places=("reset", "reward"), seed=5)
  trained, version = [], 0
  engine = FakeEngine(SamplerConfig(num_slots=8, context_length=64, decode_steps=4))
  with SamplerService(Scheduler(engine)) as service:
    loop = make_loop(
      lambda: chaos.make(None),
      service,
      slots=6,
      deterministic=True,
      environment_timeout=0.5,
      max_staleness=4,
    )
    with Running(loop):
      for _ in range(6):
        trained += [
          (t.rollout_id, t.token_ids.tolist(), t.reward, t.status) for t in loop.buffer.take(4, version, timeout=60)
        ]
        version += 1
        loop.wait_until_idle(60)
        service.publish(None, version)
        loop.on_version(version)
      loop.wait_until_idle(60)
      stats = loop.stats()
  assert {UNKNOWN, KILLED, TIMEOUT} <= set(stats)
  return trained, {outcome: stats[outcome.value] for outcome in Outcome}


def test_a_deterministic_run_repeats_itself_faults_and_all():
  trained, outcomes = deterministic_run()
  assert len(trained) == outcomes[Outcome.TRAINED] == 24
  assert deterministic_run() == (trained, outcomes)
