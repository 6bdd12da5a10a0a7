"""The corridor: walks turn by turn, dead ends that are dead, the expert, prompts, states, configurations."""

from __future__ import annotations

import asyncio
import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import corridor as corridor_3
from configs import corridor_10, corridor_30
from sao_jax.configuration.relations import validate
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import DemonstratingSpec, check_step_result
from sao_jax.environments.corridor import CLUTTER, LEVELS, Corridor
from sao_jax.environments.token_turns import turns_of
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError

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


def test_held_out_corridors_differ_levels_take_turns_and_splits_are_apart():
  settings, texts = Corridor(), {}
  for split in ("train", "heldout"):
    prompts = settings.prompts(TOKENIZER, split, 1)
    assert [prompts[index].data["level"] for index in range(6)] == ["easy", "medium", "hard"] * 2
    data = [prompts[index].data for index in range(300)]
    assert all(len(each["doors"]) == 3 and each["key"] in "uvwxyz" for each in data)
    assert all(each["doors"].isalpha() for each in data if each["level"] == "easy")
    assert all(each["doors"].isdigit() for each in data if each["level"] == "hard")
    texts[split] = [" ".join(each.values()) for each in data]
    assert prompts[7] == settings.prompts(TOKENIZER, split, 1)[7] != settings.prompts(TOKENIZER, split, 2)[7]
    with pytest.raises(IndexError):
      prompts[len(prompts)]
  assert len(set(texts["heldout"])) == 300 and not set(texts["heldout"]) & set(texts["train"])
  assert 0 < len(Corridor(horizon=1, levels=("easy",)).prompts(TOKENIZER, "heldout", 0)) < 36  # of 36 in both splits


@pytest.mark.parametrize("horizon", [3, 10, 30])
def test_the_expert_is_as_good_at_all_horizons_and_plays_the_task_itself(horizon):
  settings, rng = Corridor(horizon=horizon), np.random.default_rng(0)
  assert isinstance(settings, DemonstratingSpec)
  prompts, rewards = settings.prompts(TOKENIZER, "train", 0), collections.defaultdict(list)
  for index in range(180):
    task = prompts[index]
    shown = settings.demonstration(task, TOKENIZER, rng)
    rewards[task.data["level"]].append(shown.reward)

    # Its words, said to the environment, show the same again.
    if index < 6:
      turns = list(turns_of(shown.token_ids, shown.action_mask))
      seen, result = play(settings, [TOKENIZER.decode(action) for _, action in turns], task)
      assert seen[:-1] == [TOKENIZER.decode(each) for each, _ in turns] and result.reward == shown.reward
  easy, medium, hard = (np.mean(rewards[level]) for level in LEVELS)
  assert 0.7 < easy < 0.97 and 0.2 < medium < 0.55 and 0.01 < hard < 0.27


def test_clutter_stands_before_every_sign_and_depends_on_the_corridor_alone():
  settings = Corridor(clutter=5)
  (first, second, _, _), _ = play(settings, said("d", "b", "b"))
  assert len(second) == 6 and second[-1] == "B" and first[-1] == "2" and set(second[:5]) <= {*CLUTTER}
  assert play(settings, said("d", "b", "b"))[0][1] == second != play(settings, said("d"), prompt("2B5"))[0][1]


def test_states_are_read_from_the_tokens():
  settings, task = Corridor(repairs=1), prompt()
  episode = settings.make(TOKENIZER)
  pieces, masks = [episode.begin(task)], [False]
  for word in (".e", "<", "d", "a", "c"):
    action = TOKENIZER.encode_with_specials(f"{word}<|end|>")
    pieces += [action, episode.respond(action).observation]
    masks += [True, False]
  mask = np.concatenate([np.full(len(piece), masked) for piece, masked in zip(pieces, masks)])
  locked, side = ("m", 3, "door", 1, "locked"), ("m", 3, "side", 0, "plain")
  again, second, dead = ("m", 3, "door", 0, "locked"), ("m", 2, "door", 0, "plain"), ("m", 1, "dead", 0, "plain")
  assert settings.states(np.concatenate(pieces), mask) == [
    *((*locked, None), (*locked, None), (*locked, "side")),
    *((*side, None), (*side, "door"), (*again, None), (*again, "door")),
    *((*second, None), (*second, "dead"), (*dead, None), (*dead, "dead")),
  ]


@pytest.mark.parametrize(
  "field, value",
  [("horizon", 0), ("levels", ()), ("levels", ("mild",)), ("repairs", -1), ("dead_ends", "never"), ("clutter", -1)]
  + [("easy_success", 0.0), ("hard_success", 1.5), ("pauses", 1.0), ("num_prompts", 0)],
)
def test_settings_that_cannot_work_are_refused(field, value):
  with pytest.raises(ConfigError, match=f"environment.{field}"):
    dataclasses.replace(Corridor(), **{field: value})


@pytest.mark.parametrize("config", [corridor_3, corridor_10, corridor_30])
def test_the_configurations_are_valid(config):
  run = config.get_config()
  validate(run, training=True)
  assert run.rollout.max_turns == run.environment.inner.max_calls
