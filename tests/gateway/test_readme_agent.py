"""The README's agent plays an episode, and the example on the openai client says what its demonstrations say."""

from __future__ import annotations

import asyncio
import importlib
import json
import re

import numpy as np
from toys.agent_toy import TOKENIZER, Speaker, episode, texts_of
from toys.paths import REPOSITORY

from configs import gateway_agent
from sao_jax.configuration.relations import validate


def test_the_agent_of_the_readme(tmp_path, monkeypatch):
  text = (REPOSITORY / "sao_jax" / "gateway" / "README.md").read_text()
  harness, config = re.findall(r"```python\n(.*?)```", text.partition("## Train your own agent")[2], re.DOTALL)[:2]
  (tmp_path / "my_agent.py").write_text(harness)
  (tmp_path / "my_agent_config.py").write_text(config)
  lines = [json.dumps({"question": f"{i}+1?", "answer": str(i + 1)}) for i in range(30)]
  (tmp_path / "questions.jsonl").write_text("\n".join(lines))
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)

  run = importlib.import_module("my_agent_config").get_config()
  validate(run, training=True)
  right = run.environment.prompts(TOKENIZER, "train", 0)[4].data["answer"]
  for said, reward in ((right, 1.0), ("0", 0.0)):
    trajectory = asyncio.run(episode(run.environment, Speaker(said), 4))
    assert trajectory.reward == reward
  assert texts_of(trajectory)[0].endswith("1?<|end|><|assistant|>0<|end|>")


def test_the_example_that_learns_imitates_its_own_harness():
  agent = gateway_agent.get_config().environment
  prompt = agent.prompts(TOKENIZER, "train", 0)[0]
  seen = set()
  for seed in range(40):
    shown = agent.demonstration(prompt, TOKENIZER, np.random.default_rng(seed))
    turns = TOKENIZER.decode(shown.token_ids[shown.action_mask]).split("<|end|>")[:-1]
    if (kind := (len(turns), shown.reward)) in seen or len(seen) == 3:
      continue
    seen.add(kind)
    trajectory = asyncio.run(episode(agent, Speaker(*turns)))
    np.testing.assert_array_equal(trajectory.token_ids, shown.token_ids)
    np.testing.assert_array_equal(trajectory.action_mask, shown.action_mask)
    assert trajectory.reward == shown.reward
  assert {(2, 1.0), (2, 0.0)} <= seen
