"""Demonstrations: token for token what the environment would hold, and wrong as often as asked."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import training_toy

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.wrappers import Chaos, SimulatedLatency
from sao_jax.errors import ConfigError
from sao_jax.training.demonstrations import Demonstrations

TOKENIZER = ByteTokenizer()


def demonstrate(settings: Calculator, index: int, seed: int):
  prompt = settings.prompts(TOKENIZER, "train", 0)[index]
  return prompt, settings.demonstration(prompt, TOKENIZER, np.random.default_rng((seed, index)))


def replay(settings: Calculator, prompt, demonstration):
  """Plays the demonstrated actions against a fresh environment; returns ids, mask and reward of that episode."""

  async def episode():
    environment = settings.make(TOKENIZER)
    ids = list(await environment.reset(prompt))
    mask, action, reward = [False] * len(ids), [], None
    while reward is None:
      token = demonstration.token_ids[len(ids)]
      ids.append(token)
      mask.append(True)
      action.append(token)
      if token in environment.stop_ids:
        result = await environment.step(np.array(action))
        ids += list(result.observation)
        mask += [False] * len(result.observation)
        action, reward = [], result.reward
    return ids, mask, reward

  return asyncio.run(episode())


@given(st.integers(0, 1000), st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 1.0]), st.integers(2, 6))
def test_a_demonstration_is_an_episode_of_the_environment(index, seed, noise, num_operands):
  settings = Calculator(num_operands=num_operands, max_operand=99, max_calls=7, demonstration_noise=noise)
  prompt, demonstration = demonstrate(settings, index, seed)
  ids, mask, reward = replay(settings, prompt, demonstration)
  assert demonstration.token_ids.dtype == np.int32 and demonstration.action_mask.dtype == np.bool_
  assert demonstration.token_ids.tolist() == ids
  assert demonstration.action_mask.tolist() == mask
  assert demonstration.reward == reward
  assert (demonstration.token_ids == TOKENIZER.bos_id).sum() == 1
  ends = demonstration.token_ids == TOKENIZER.end_id  # the ends of turns that the expert wrote are imitated too
  turns = np.flatnonzero(np.diff(demonstration.action_mask.astype(np.int8)) == 1)
  assert (ends & demonstration.action_mask).sum() == len(turns)


def test_the_same_generator_gives_the_same_demonstration():
  one, other = (demonstrate(Calculator(), 5, 1)[1] for _ in range(2))
  np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_without_noise_the_expert_is_perfect():
  settings = Calculator(demonstration_noise=0.0)
  assert all(demonstrate(settings, index, 0)[1].reward == 1.0 for index in range(300))


def test_with_the_default_noise_a_perfect_imitator_succeeds_in_30_to_45_percent():
  rewards = [demonstrate(Calculator(), index, 0)[1].reward for index in range(3000)]
  assert 0.35 < np.mean(rewards) < 0.45  # measured 0.42; standard error 0.009
  assert np.mean([demonstrate(Calculator(demonstration_noise=0.1), i, 0)[1].reward for i in range(500)]) > 0.7
  assert np.mean([demonstrate(Calculator(demonstration_noise=1.0), i, 0)[1].reward for i in range(500)]) < 0.1


def test_every_kind_of_mistake_is_made():
  """Wrong digits and operators, wrong order, answers before computing, malformed calls that are then repeated."""
  texts = []
  for index in range(500):
    _, demonstration = demonstrate(Calculator(), index, 0)
    texts.append(TOKENIZER.decode(demonstration.token_ids))
  assert any("<|observation|>error<|end|>" in text for text in texts)
  assert any("<|observation|>" not in text for text in texts)  # answered at once
  recovered = [text for text in texts if "<|observation|>error<|end|>" in text]
  assert any(text.count("<|tool_call|>") == 3 for text in recovered)
  assert any(text.count("<|tool_call|>") == 1 and "error" not in text for text in texts)


@pytest.mark.parametrize("operators", ["+", "-", "*", "+-"])
def test_any_choice_of_operators_has_imperfect_demonstrations(operators):
  settings = dataclasses.replace(Calculator(), operators=operators, demonstration_noise=0.5)
  rewards = [demonstrate(settings, index, 0)[1].reward for index in range(200)]
  assert set(rewards) == {0.0, 1.0}


@dataclasses.dataclass(frozen=True)
class WithoutExpert:
  """An environment that nobody can be shown how to solve."""

  name: str = "lonely"


@pytest.mark.parametrize("wrap", [Chaos, SimulatedLatency, lambda inner: SimulatedLatency(Chaos(inner))])
def test_a_wrapper_has_an_expert_exactly_where_the_inner_environment_has_one(wrap):
  assert hasattr(wrap(Calculator()), "demonstration") and not hasattr(wrap(WithoutExpert()), "demonstration")
  config = dataclasses.replace(training_toy.get_config(), environment=wrap(WithoutExpert()))
  with pytest.raises(ConfigError, match=r"(?s)environment: lonely produces no demonstrations.*remedy"):
    Demonstrations(config)
