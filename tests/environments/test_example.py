"""The example of the README is a complete environment of at most 40 lines."""

from __future__ import annotations

import asyncio
import pathlib

from toys import readme_environment

from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.environments.base import check_step_result, check_token_ids


def play(prompt, guesses):
  settings = readme_environment.GuessNumber()
  tokenizer = settings.tokenizer()

  async def episode():
    environment = settings.make(tokenizer)
    ids = await environment.reset(prompt)
    check_token_ids(ids, environment=settings.name, vocab_size=tokenizer.vocab_size, what="the prompt")
    assert list(ids).count(tokenizer.bos_id) == 1
    results = []
    for guess in guesses:
      result = await environment.step(tokenizer.encode_with_specials(f"{guess}<|end|>"))
      results.append(check_step_result(result, environment=settings.name, vocab_size=tokenizer.vocab_size))
    return [(tokenizer.decode(result.observation), result.done, result.reward) for result in results]

  return asyncio.run(episode())


def hint(text: str) -> str:
  return f"<|user|>{text}<|end|><|assistant|>"


def test_it_plays():
  prompt = readme_environment.GuessNumber().prompts(None, "train", 0)[6]
  assert play(prompt, [5, 9, 7]) == [(hint("higher"), False, None), (hint("lower"), False, None), ("", True, 1.0)]
  assert play(prompt, ["seven", "9**9", 1, 2])[-1] == ("", True, 0.0)
  assert play(prompt, ["seven"]) == [(hint("error"), False, None)]


def test_its_prompts_go_through_the_iterator():
  source = readme_environment.GuessNumber().prompts(None, "train", 0)
  iterator = make_prompt_iterator(source, seed=0)
  assert sorted(next(iterator).data["secret"] for _ in range(9)) == list(range(1, 10))


def test_it_fits_on_a_screen():
  assert len(pathlib.Path(readme_environment.__file__).read_text().splitlines()) <= 40
