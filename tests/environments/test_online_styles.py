"""The online task: what is wanted, and when, is a function of the prompt's key; every style is rewarded somewhere."""

from __future__ import annotations

import asyncio
import collections
import dataclasses

import numpy as np
import pytest

from configs import online_learning
from sao_jax.configuration.relations import validate
from sao_jax.data.prompts import make_prompt_iterator, split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.answers import encode_question
from sao_jax.environments.base import DemonstratingSpec
from sao_jax.environments.online_styles import STYLES, OnlineStyles, pose, solve, style_of, write_answer, write_number
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError

TOKENIZER = ByteTokenizer()
ROMAN_DIGITS = {"C": 100, "L": 50, "X": 10, "V": 5, "I": 1}


def prompt(epoch=0, offered=("roman", "digits"), by_phase=True):
  data = {"question": "3+4", "offered": list(offered), "by_phase": by_phase}
  return Prompt(PromptKey("online_styles", 5, epoch), data)


def play(settings, task, said):
  async def episode():
    environment = settings.make(TOKENIZER)
    await environment.reset(task)
    return await environment.step(TOKENIZER.encode_with_specials(said))

  return asyncio.run(episode())


def test_numbers_are_written_in_styles_that_are_told_apart():
  for value in range(1, 100):
    written = [write_number(value, style) for style in STYLES]
    assert [style_of(f"{style}:{text}") for style, text in zip(STYLES, written)] == [*STYLES]
    assert int(written[0]) == value
    signs = [ROMAN_DIGITS[sign] for sign in written[2]]
    assert sum(-now if now < later else now for now, later in zip(signs, [*signs[1:], 0])) == value
  assert len({write_number(value, "words") for value in range(1, 100)}) == 99
  bad = (None, "", "7", "digits:", "digits:seven", "words:Seven", "words:a b c", "roman:vii", "digits: 7", "prose:7")
  assert [style_of(said) for said in bad] == [None] * len(bad)


@pytest.mark.parametrize(
  "said, epoch, reward, style, success",
  [
    ("digits:7", 0, 1.0, 1.0, 1.0),
    ("digits:8", 0, 0.0, 1.0, 0.0),
    ("roman:VII", 0, 0.2, 0.2, 0.0),
    ("roman:VIII", 0, 0.0, 0.2, 0.0),
    ("roman:IIIIIII", 0, 0.0, 0.2, 0.0),
    ("words:seven", 0, 0.0, 0.0, 0.0),
    ("words:seven", 1, 0.0, 0.0, None),
    ("digits:7", 1, 0.2, 0.2, None),
    ("roman:VII", 2, 1.0, 1.0, 1.0),
    ("roman:VII", 9, 1.0, 1.0, 1.0),
    ("digits:7", 2, 0.2, 0.2, 0.0),
    ("digits:+7", 0, 0.0, 0.0, 0.0),
    ("digits:VII", 0, 0.0, 0.0, 0.0),
    ("7", 0, 0.0, 0.0, 0.0),
  ],
)
def test_the_reward_is_quality_times_the_style_of_the_phase(said, epoch, reward, style, success):
  result = play(OnlineStyles(), prompt(epoch), f"<|answer|>{said}<|end|>")
  assert result.done and result.reward == pytest.approx(reward) and result.info["reward_style"] == style
  assert result.info.get("success") == success and result.info["phase"] == min(epoch, 2)
  assert [result.info[f"style_{name}"] for name in STYLES] == [float(style_of(said) == name) for name in STYLES]


def test_a_style_that_is_offered_alone_may_earn_as_much_as_the_wanted_one():
  settings = OnlineStyles(alone=1.0, single=0.6)
  alone, both = prompt(0, ("roman",)), prompt(0, ("roman", "digits"))
  rewards = [play(settings, task, "<|answer|>roman:VII<|end|>").reward for task in (alone, both)]
  assert rewards == [1.0, pytest.approx(0.2)]
  assert play(settings, alone, "<|answer|>digits:7<|end|>").reward == 0.0
  assert play(OnlineStyles(), alone, "<|answer|>roman:VII<|end|>").reward == pytest.approx(0.2)
  train = settings.prompts(TOKENIZER, "train", 0)
  sizes = collections.Counter(len(train[index].data["offered"]) for index in range(600))
  assert 320 < sizes[1] < 400 and min(sizes[2], sizes[3]) > 80


def test_what_is_no_answer_earns_nothing_and_held_out_any_offered_style_is_right():
  settings = OnlineStyles()
  assert play(settings, prompt(), "digits:7<|end|>").reward == 0.0
  task, answers = prompt(2, by_phase=False), ("digits:7", "roman:VII", "words:seven", "digits:8")
  heldout = [play(settings, task, f"<|answer|>{said}<|end|>") for said in answers]
  assert [result.reward for result in heldout] == [1.0, 1.0, 0.0, 0.0] and "success" not in heldout[0].info


def test_phases_are_passes_over_the_prompts_whatever_the_process_and_after_a_resume():
  settings = OnlineStyles(phase_prompts=12)
  source = settings.prompts(TOKENIZER, "train", 0)

  def phases(count, shard=(0, 1), state=None):
    iterator = make_prompt_iterator(source, seed=1, shard=shard)
    if state is not None:
      iterator.set_state(state)
    return [settings.phase(next(iterator).key) for _ in range(count)], iterator.get_state()

  whole, _ = phases(48)
  assert whole == [0] * 12 + [1] * 12 + [2] * 24
  first, state = phases(17)
  assert first + phases(31, state=state)[0] == whole
  shares = [phases(24, shard=(index, 2))[0] for index in range(2)]
  assert [phase for pair in zip(*shares) for phase in pair] == whole


def test_every_style_is_offered_without_the_others_and_splits_are_apart():
  settings = OnlineStyles()
  train, heldout = (settings.prompts(TOKENIZER, split, 0) for split in ("train", "heldout"))
  offers = collections.Counter(tuple(train[index].data["offered"]) for index in range(600))
  assert len(offers) == 15 and min(offers.values()) > 15
  assert len({pose(heldout[index]) for index in range(len(heldout))}) == len(heldout) > 60
  for split, prompts in (("train", train), ("heldout", heldout)):
    assert all(split_of(prompts[index].data["question"]) == split for index in range(60))
  assert train[7] == settings.prompts(TOKENIZER, "train", 0)[7] != settings.prompts(TOKENIZER, "train", 1)[7]


def test_demonstrations_show_offered_styles_and_are_wrong_as_often_as_they_should():
  settings, rng = OnlineStyles(), np.random.default_rng(0)
  assert isinstance(settings, DemonstratingSpec)
  seen, right = collections.Counter(), 0
  for index in range(300):
    task = settings.prompts(TOKENIZER, "train", 0)[index]
    shown = settings.demonstration(task, TOKENIZER, rng)
    said = TOKENIZER.decode(shown.token_ids[shown.action_mask]).removeprefix("<|answer|>").removesuffix("<|end|>")
    style = style_of(said)
    seen[style] += 1
    right += said == write_answer(solve(task), style)
    assert style in task.data["offered"]
    assert shown.reward == play(settings, task, f"<|answer|>{said}<|end|>").reward
  assert min(seen[style] for style in STYLES) > 60 and 180 < right < 240


def test_states_tell_what_is_offered_and_what_an_answer_has_chosen():
  settings, task = OnlineStyles(), prompt()
  shown = encode_question(TOKENIZER, pose(task))
  action = TOKENIZER.encode_with_specials("<|answer|>roman:VI<|end|>")
  states = settings.states(np.concatenate([shown, action]), np.arange(len(shown) + len(action)) >= len(shown))
  offered = frozenset({"roman", "digits"})
  assert states[:7] == [(offered, None, True)] * 7 and states[7:] == [(offered, "roman", True)] * 3
  action[-2] = ord("X")  # 3 + 4 is no VX
  states = settings.states(np.concatenate([shown, action]), np.arange(len(shown) + len(action)) >= len(shown))
  assert states[-1] == (offered, "roman", False)


def test_the_configuration_is_valid_and_has_three_phases_of_whole_batches():
  config = online_learning.get_config()
  validate(config, training=True)
  environment = config.environment
  assert environment.phase_prompts * len(environment.wanted) == config.training.steps * config.rollout.batch_size
  longest = max(len(TOKENIZER.encode(pose(prompt(offered=order)))) for order in [STYLES, STYLES[::-1]]) + 4
  assert longest + 2 + len("words:seventeen") <= config.sampler.context_length


@pytest.mark.parametrize(
  "field, value",
  [("max_operand", 50), ("wanted", ()), ("wanted", ("prose",)), ("phase_prompts", 0), ("others", 1.0)]
  + [("alone", 1.5), ("single", -0.1)],
)
def test_settings_that_cannot_work_are_refused(field, value):
  with pytest.raises(ConfigError, match=f"environment.{field}"):
    dataclasses.replace(OnlineStyles(), **{field: value})
