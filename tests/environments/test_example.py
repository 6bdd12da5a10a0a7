"""The example of environments/WRITE.md is a complete environment of at most 40 lines."""

from __future__ import annotations

import asyncio
import pathlib

import pytest
from toys import readme_environment

from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.environments.base import EnvironmentSpec, check_step_result, check_token_ids
from sao_jax.errors import ConfigError

SETTINGS = readme_environment.GuessNumber()
TOKENIZER = SETTINGS.tokenizer()
HELDOUT = 123  # as in evaluation.prompts of the README's configuration


def play(prompt, guesses):
  async def episode():
    environment = SETTINGS.make(TOKENIZER)
    ids = await environment.reset(prompt)
    check_token_ids(ids, environment=SETTINGS.name, vocab_size=TOKENIZER.vocab_size, what="the prompt")
    assert list(ids).count(TOKENIZER.bos_id) == 1
    assert f"<|user|>{prompt.data['shown']}<|end|>" in TOKENIZER.decode(ids)
    results = []
    for guess in guesses:
      action = TOKENIZER.encode_with_specials(guess)
      assert action[-1] in environment.stop_ids
      result = await environment.step(action)
      results.append(check_step_result(result, environment=SETTINGS.name, vocab_size=TOKENIZER.vocab_size))
    return [(TOKENIZER.decode(result.observation), result.done, result.reward) for result in results]

  return asyncio.run(episode())


def hint(text: str) -> str:
  return f"<|user|>{text}<|end|><|assistant|>"


def prompt_with(shown: str, hidden: str):
  prompts = [prompt for split in ("train", "heldout") for prompt in SETTINGS.prompts(TOKENIZER, split, 0)]
  (prompt,) = (prompt for prompt in prompts if prompt.data == {"shown": shown, "hidden": hidden})
  return prompt


def test_it_follows_the_protocol():
  assert isinstance(SETTINGS, EnvironmentSpec)


def test_it_plays():
  prompt = prompt_with("24578", "7")
  assert play(prompt, ["5", "8", "7"]) == [(hint("+"), False, None), (hint("-"), False, None), ("", True, 1.0)]
  assert play(prompt, ["7"]) == [("", True, 1.0)]
  assert play(prompt, ["1", "2", "8"])[-1] == ("", True, 0.0)
  assert play(prompt, ["well, <|eos|>5"]) == [(hint("+"), False, None)]  # what stands before the digit is free


def test_its_splits_are_disjoint():
  splits = {split: SETTINGS.prompts(TOKENIZER, split, 0) for split in ("train", "heldout")}
  hands = {split: {prompt.data["shown"] for prompt in prompts} for split, prompts in splits.items()}
  assert not hands["train"] & hands["heldout"]
  assert len(hands["train"]) + len(hands["heldout"]) == 2**8 - 8 - 1  # every hand of two digits or more
  assert len(splits["heldout"]) == HELDOUT
  for prompts in splits.values():
    assert [prompt.key.id for prompt in prompts] == list(range(len(prompts)))
  with pytest.raises(ConfigError, match="test"):
    SETTINGS.prompts(TOKENIZER, "test", 0)


def test_its_prompts_go_through_the_iterator():
  source = SETTINGS.prompts(TOKENIZER, "train", 0)
  iterator = make_prompt_iterator(source, seed=0)
  seen = sorted(tuple(next(iterator).data.values()) for _ in source)
  assert seen == sorted(tuple(prompt.data.values()) for prompt in source)


def test_it_fits_on_a_screen():
  assert len(pathlib.Path(readme_environment.__file__).read_text().splitlines()) <= 40
