"""The examples of environments/README.md and environments/WRITE.md that are not commands: they run as they stand."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys

import numpy as np
import pytest
from toys.paths import REPOSITORY
from toys.scripted_policy import WIDE, play

from sao_jax.environments.base import DemonstratingSpec
from sao_jax.environments.mixture import Mixture
from sao_jax.environments.openenv_adapter import OpenEnv
from sao_jax.environments.text_game import TextGame
from sao_jax.episode import Status
from sao_jax.gateway.verifiers_adapter import Verifiers


def block_of(document: str, heading: str) -> str:
  text = (REPOSITORY / "sao_jax" / "environments" / document).read_text(encoding="utf-8")
  section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
  return re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[1]


@pytest.fixture
def riddles(tmp_path, monkeypatch):
  """The settings of `riddles.py`, with three riddles to train on and one that is held out."""
  (tmp_path / "riddles.py").write_text(block_of("WRITE.md", "Splits, data sets and demonstrations"))
  folder = tmp_path / "data"
  folder.mkdir()
  for split, numbers in (("train", (1, 2, 3)), ("heldout", (4,))):
    lines = [{"riddle": f"{n}+{n}?", "answer": str(2 * n), "hint": "twice"} for n in numbers]
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  monkeypatch.syspath_prepend(tmp_path)
  yield importlib.import_module("riddles").Riddles(str(folder))
  del sys.modules["riddles"]


def test_a_chat_with_files_and_demonstrations(riddles):
  tokenizer = riddles.tokenizer()
  train, heldout = (riddles.prompts(tokenizer, split, 0) for split in ("train", "heldout"))
  assert [len(train), len(heldout)] == [3, 1] and isinstance(riddles, DemonstratingSpec)

  # Right at once, right after the hint, and cut by the turn limit.
  assert play(riddles, train[1], lambda text: "4").reward == 1.0
  second = play(riddles, train[1], lambda text: "4" if "twice" in text else "5")
  assert (second.reward, second.info["tries"], second.status) == (0.5, 2.0, Status.TERMINATED)
  cut = play(riddles, train[1], lambda text: "5", limits=dataclasses.replace(WIDE, max_turns=2))
  assert (cut.reward, cut.status) == (-0.5, Status.TRUNCATED_TURNS)

  # A demonstration is an episode, token by token, and as it would be rewarded.
  shown = [riddles.demonstration(train[1], tokenizer, np.random.default_rng(seed)) for seed in range(8)]
  assert {demonstration.reward for demonstration in shown} == {1.0, 0.5}
  for demonstration in shown:
    said = iter(["4"] if demonstration.reward == 1.0 else ["?", "4"])
    episode = play(riddles, train[1], lambda text, said=said: next(said))
    assert episode.token_ids.tolist() == demonstration.token_ids.tolist() and episode.reward == demonstration.reward
    assert episode.action_mask.tolist() == demonstration.action_mask.tolist()


def test_games_and_adapters_are_settings():
  names: dict[str, object] = {}
  exec(block_of("README.md", "Games"), names)
  environment = names["get_config"]().environment
  assert isinstance(environment, Mixture) and all(isinstance(part.environment, TextGame) for part in environment.parts)
  exec(block_of("README.md", "Environments of verifiers and OpenEnv"), names)
  assert isinstance(names["by_verifiers"], Verifiers) and isinstance(names["by_openenv"], OpenEnv)
  assert names["elsewhere"].sessions == 64
