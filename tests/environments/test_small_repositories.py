"""Small repositories: drawn by the seed, split by their names, and played by an expert as a real episode goes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from toys import sandboxes

from sao_jax.data.prompts import split_of
from sao_jax.environments.small_repositories import (
  NAMES,
  OPERATORS,
  POINTS,
  DrawnRepositories,
  SmallRepositories,
  demonstrate,
  make_record,
)
from sao_jax.episode import BadPrompt

needs_sandbox = pytest.mark.skipif(bool(sandboxes.missing()), reason=sandboxes.missing())


def test_repositories_depend_on_the_seed_and_splits_are_apart():
  train, heldout = (DrawnRepositories("small", split, seed=3) for split in ("train", "heldout"))
  drawn = [[prompts[index].data["instance_id"] for index in range(300)] for prompts in (train, heldout)]
  assert not set(drawn[0]) & set(drawn[1])
  assert [{split_of(name) for name in names} for names in drawn] == [{"train"}, {"heldout"}]
  assert len(set(drawn[1])) > 290
  assert train[7] == DrawnRepositories("small", "train", seed=3)[7] != DrawnRepositories("small", "train", seed=4)[7]
  with pytest.raises(IndexError):
    heldout[len(heldout)]
  with pytest.raises(BadPrompt, match="no name of a small repository"):
    make_record("ka+3 bo*7")


def test_hidden_tests_tell_every_bug_from_every_solution():
  """Evaluates the functions here, as the tests of the record say; any two operators differ at one of the points."""
  for number in range(2, 10):
    values = [tuple(eval(f"{x}{operator}{number}") for x in POINTS) for operator in OPERATORS]
    assert len(set(values)) == len(OPERATORS)
  record = make_record("ka+3 bo*7 bo-")
  assert record.snapshot == {"m.py": "def ka(x): return x+3\ndef bo(x): return x*7\n"}
  assert record.problem_statement == "bo(x): x-7"
  assert (record.fail_to_pass, record.pass_to_pass) == (("test_m.py::test_bo",), ("test_m.py::test_ka",))
  assert "+  assert m.ka(2) == 5\n" in record.test_patch and "+  assert m.bo(11) == 4\n" in record.test_patch
  assert not any(name in "def (x): return x" for name in NAMES)  # sed's /name/ means one line


def test_the_expert_is_right_without_mistakes_and_wrong_as_often_as_they_come():
  rng = np.random.default_rng(0)
  names = [DrawnRepositories("small", "train", seed=0)[index].data["instance_id"] for index in range(400)]
  assert all(demonstrate(name, rng, 0.0)[1] for name in names)
  # A look is left out with probability 0.4, and half of the guesses are right; two mistakes of three do harm.
  solved = np.mean([demonstrate(name, rng, 0.4)[1] for name in names])
  assert abs(solved - (1 - 0.4 / 2) * (1 - 0.4 * 2 / 3)) < 0.08


@needs_sandbox
def test_demonstrations_are_what_real_episodes_hold_and_earn():
  settings = SmallRepositories(demonstration_noise=0.7)
  tokenizer = settings.tokenizer()
  prompts, rng = settings.prompts(tokenizer, "train", 0), np.random.default_rng(1)

  async def play(index):
    shown = settings.demonstration(prompts[index], tokenizer, rng)
    starts = np.flatnonzero(np.diff(shown.action_mask.astype(int)) == 1) + 1
    ends = np.flatnonzero(np.diff(np.append(shown.action_mask, False).astype(int)) == -1) + 1
    episode = settings.make(tokenizer)
    held = [await episode.reset(prompts[index])]
    for start, end in zip(starts, ends, strict=True):
      action = shown.token_ids[start:end]
      result = await episode.step(action)
      held += [action, result.observation]
    await episode.close()
    np.testing.assert_array_equal(np.concatenate(held), shown.token_ids)
    assert result.reward == shown.reward
    return "unterminated" in tokenizer.decode(shown.token_ids), result.reward

  async def play_all():
    return await asyncio.gather(*map(play, range(10)))

  malformed, rewards = zip(*asyncio.run(play_all()))
  assert any(malformed) and len(set(rewards)) == 2
