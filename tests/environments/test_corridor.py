"""The corridor: walks turn by turn, dead ends that are dead, the expert, prompts, states, configurations."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import corridor as corridor_3
from configs import corridor_10, corridor_30
from sao_jax.configuration.relations import validate
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import check_step_result
from sao_jax.environments.corridor import Corridor
from sao_jax.episode import Prompt, PromptKey

TOKENIZER = ByteTokenizer()


def prompt(doors="2B6", key="w", level="medium"):
  return Prompt(PromptKey("corridor", 0, 0), {"level": level, "key": key, "doors": doors})


def play(settings, actions, task=None):
  """(all that is shown, the last result) of an episode in which the policy says `actions`, each with its end."""
  task = task or prompt()
  episode = settings.make(TOKENIZER)
  shown = [TOKENIZER.decode(asyncio.run(episode.reset(task)))]
  for action in actions:
    result = asyncio.run(episode.step(TOKENIZER.encode_with_specials(action)))
    result = check_step_result(result, environment="corridor", vocab_size=TOKENIZER.vocab_size)
    shown.append(TOKENIZER.decode(result.observation))
    if result.done:
      break
  return shown, result


def said(*words):
  return [f"{word}<|end|>" for word in words]


def test_a_walk_turn_by_turn():
  shown, result = play(Corridor(), said("d", "..b", "c", "<", "b"))
  assert shown == ["<|bos|><|user|>mw2", "B", "6", "?", "6", ""]
  assert result.done and result.reward == 1.0
  facts = {"calls": 5.0, "doors": 1.0, "dead_end": 0.0, "left_early": 0.0, "repairs": 1.0, "solved_medium": 1.0}
  assert result.info == facts


@pytest.mark.parametrize(
  "dead_ends, shown",
  [("marked", ["x", "x", "x"]), ("once", ["x", "3", "D"]), ("silent", ["B", "3", "D"])],
)
def test_a_dead_end_shows_as_it_should_and_earns_nothing_whatever_comes(dead_ends, shown):
  settings, task = Corridor(horizon=4, dead_ends=dead_ends), prompt("AB3D", "v", "medium")
  seen, result = play(settings, said("c", "b", "d", "d"), task)
  assert seen == ["<|bos|><|user|>mvA", *shown, ""]
  assert result.done and result.reward == 0.0 and result.info["dead_end"] == 1.0 and result.info["doors"] == 1.0


@pytest.mark.parametrize(
  "actions, observations, reward",
  [
    (["d<|end|>", "b<|end|>", "b<|end|>"], ["B", "6", ""], 1.0),
    (["e<|end|>", "b<|end|>", "b<|end|>", "b<|end|>"], ["?", "x", "x", ""], 0.0),  # not the way back
    (["e<|end|>", "<<|end|>", "e<|end|>", "b<|end|>"], ["?", "2", "x", "x"], 0.0),  # no repair is left
    (["<<|end|>", "b<|end|>", "b<|end|>"], ["x", "x", ""], 0.0),
    (["d<|end|>", "<|end|>"], ["B", ""], 0.0),
    (["e<|end|>", "<|end|>"], ["?", ""], 0.0),
    (["dd<|end|>"], ["x"], 0.0),
    (["d.<|end|>"], ["x"], 0.0),
    (["..<|end|>"], ["x"], 0.0),
    (["<|end|><|end|>"], ["x"], 0.0),
    (["<|bos|>d<|end|>"], ["x"], 0.0),
    (["d"], ["x"], 0.0),
    ([""], ["x"], 0.0),
  ],
)
def test_words_and_what_is_none(actions, observations, reward):
  seen, result = play(Corridor(), actions)
  assert seen[1:] == observations and (result.reward or 0.0) == reward
  assert result.done == (observations[-1] == "")


def simulated(doors, key, repairs, words):
  """(reward, turns) of a walk, told again in other words: numbers and no rooms."""
  left, aside, alive, turns = [*doors], False, True, 0
  for word in words:
    turns += 1
    if word == "":
      return 0.0, turns
    if alive and aside:
      alive, aside = word == "<", False
      if alive:
        continue
    elif alive:
      sign = left[0]
      number = ord(sign) - ord("A") if sign.isalpha() else ord(sign) - ord("1") + ord(key) - ord("u")
      off = (ord(word) - ord("a") - number) % 6 if "a" <= word <= "f" else 9
      if off == 1 and repairs:
        repairs, aside = repairs - 1, True
        continue
      alive = off == 0
    left.pop(0)
    if not left:
      return float(alive), turns
  return None, turns


@given(
  st.text("ABF136", min_size=1, max_size=4),
  st.sampled_from("uwz"),
  st.integers(0, 2),
  st.lists(st.one_of(st.sampled_from(["right", "near", "<"]), st.sampled_from(["", *"abcdef", "q"])), max_size=9),
)
def test_rewards_are_those_of_a_second_simulator(doors, key, repairs, plan):
  settings = Corridor(horizon=len(doors), repairs=repairs)
  episode = settings.make(TOKENIZER)
  episode.begin(prompt(doors, key))
  words, reward = [], None
  for word in plan:
    # Words at random seldom come far, so most are told by the door that is next.
    sign = doors[min(episode.walk.door, len(doors) - 1)]
    number = ord(sign) - ord("A") if sign.isalpha() else ord(sign) - ord("1") + ord(key) - ord("u")
    words.append({"right": "abcdef"[number % 6], "near": "abcdef"[(number + 1) % 6]}.get(word, word))
    result = episode.respond(TOKENIZER.encode_with_specials(f"{words[-1]}<|end|>"))
    if result.done:
      reward = result.reward
      break
  assert (reward, len(words)) == simulated(doors, key, repairs, words)
  assert len(words) <= settings.max_calls


@pytest.mark.parametrize("config", [corridor_3, corridor_10, corridor_30])
def test_the_configurations_are_valid(config):
  run = config.get_config()
  validate(run, training=True)
  assert run.rollout.max_turns == run.environment.inner.max_calls
