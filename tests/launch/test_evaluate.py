"""What launch.evaluate leaves behind: JSON that every parser reads, and a status that stops a script."""

from __future__ import annotations

import json
import math
import types

import jax
import pytest
from toys import suite_toy, training_toy
from toys.wiring import program_module

from sao_jax.errors import ConfigError
from sao_jax.evaluation.heldout import Evaluation
from sao_jax.evaluation.suite_episodes import EpisodeFile, read_episodes
from sao_jax.learner import placement
from sao_jax.parallel.process import WHOLE
from sao_jax.report.success_rate import success

evaluate = program_module("evaluate")


@pytest.mark.parametrize("ungraded, says", [(6, "each of the 6 episodes failed"), (0, "split has no prompts")])
def test_an_evaluation_that_could_grade_nothing_writes_null_and_fails(tmp_path, monkeypatch, ungraded, says):
  nothing = Evaluation(success(0, 0), math.nan, math.nan, ungraded, policy_version=3, trajectories=[])
  monkeypatch.setattr(evaluate, "_PHASE", types.SimpleNamespace(value=""))
  monkeypatch.setattr(evaluate, "_STEP", types.SimpleNamespace(value="3" if ungraded else ""))
  monkeypatch.setattr(evaluate, "_SUITE", types.SimpleNamespace(value=""))
  monkeypatch.setattr(evaluate.setup, "make_learner", lambda config: types.SimpleNamespace(share=WHOLE))
  monkeypatch.setattr(evaluate.sampler_side, "make_publisher", lambda learner: lambda params: params)
  monkeypatch.setattr(
    evaluate.phases, "latest_policy", lambda *arguments: evaluate.phases.LatestPolicy({}, 3, "train", "a/3")
  )
  monkeypatch.setattr(evaluate.heldout, "evaluate", lambda *arguments, **options: nothing)
  with pytest.raises(SystemExit, match=f"error: nothing could be graded: .*{says}.*evaluate again"):
    evaluate.main(training_toy.get_config(), str(tmp_path))

  def refuse(name):
    raise AssertionError(f"{name} is no JSON")

  path = tmp_path / ("evaluation_train_3.json" if ungraded else "evaluation_train.json")
  record = json.loads(path.read_text(), parse_constant=refuse)
  assert record["checkpoint"] == "a/3"  # the one that was loaded, whatever a run beside has saved since
  assert record["heldout_success"] is None and record["heldout_reward"] is None
  assert record["heldout_trials"] == 0 and record["heldout_ungraded"] == ungraded
  assert str(nothing.success) == "undefined (nothing was graded)"


def test_a_suite_is_run_by_the_policy_of_a_workdir_whatever_was_run_before(tmp_path, monkeypatch, capsys):
  """The real sampler: what one command runs, and what two run one after the other, is the same, token for token."""
  monkeypatch.setattr(placement, "local_devices", lambda: tuple(jax.devices()[:1]))
  suites = evaluate._suites
  learner = suites.setup.make_learner(suite_toy.get_config())
  params = suites.setup.init_policy_params(learner, 0)
  policy = suites.phases.LatestPolicy(params, 5, "train", "runs/a/train/7")
  monkeypatch.setattr(suites.setup, "make_learner", lambda config: learner)
  monkeypatch.setattr(suites.phases, "latest_policy", lambda *arguments: policy)
  data = suite_toy.write_lines(
    tmp_path / "aime" / "test.jsonl", [{"problem": question, "answer": answer} for question, answer in suite_toy.ROWS]
  )

  given = {"DATA": str(data.parent), "TOOLS": "none", "RUNS": 2, "PROBLEMS": None, "JUDGE": "", "JUDGE_MODEL": ""}
  for name, value in given.items():
    monkeypatch.setattr(suites, f"_{name}", types.SimpleNamespace(value=value))

  def run():
    suites.evaluate(suite_toy.get_config(), str(tmp_path), "aime25", "", "")
    record = json.loads((tmp_path / "suite_aime25_7.json").read_text())
    return record, read_episodes(tmp_path / "suite_aime25_7")

  whole = run()
  assert "runs/a/train/7, version 5\nAIME 2025: 4 problems, 2 runs" in capsys.readouterr().out
  record, episodes = whole
  assert (record["phase"], record["step"], record["policy_version"], record["episodes"]) == ("train", 7, 5, 8)
  assert len({episode.tokens for episode in episodes.values()}) > 1 and record["tools"] == "none"

  # As if it had been killed after three episodes: the others are sampled together now.
  file = tmp_path / "suite_aime25_7" / "episodes.0.jsonl"
  file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:4]))
  assert run() == whole


def test_episodes_of_another_base_model_are_none_of_this_one(tmp_path):
  """A base model has neither step nor version: its place tells it from others."""
  base = lambda place: evaluate.phases.LatestPolicy({}, 0, evaluate.phases.BASE, place)
  with EpisodeFile(tmp_path, 0, {"policy": base("models/a").identity}):
    pass
  with pytest.raises(ConfigError, match=r"policy\.checkpoint='models/a', not 'models/b'"):
    EpisodeFile(tmp_path, 0, {"policy": base("models/b").identity})
  moved = [evaluate.phases.LatestPolicy({}, 5, "train", f"{run}/train/7").identity for run in ("a", "b")]
  assert moved[0] == moved[1]
