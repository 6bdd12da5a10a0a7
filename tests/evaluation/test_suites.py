"""Published benchmarks: files as they were published, numbers that are known, and a kill in the middle."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import signal
import time

import numpy as np
import pytest
from toys import bucket_toy, fork_server, suite_toy
from toys.paths import REPOSITORY, TESTS
from toys.processes import NO_TORCH, environment
from toys.rollout_fakes import FakeSampler
from toys.shared_store import SharedStore, together

from sao_jax.configuration.paths import expand
from sao_jax.errors import ConfigError
from sao_jax.evaluation.suite import SUITES, find_suite
from sao_jax.evaluation.suite_data import find_data
from sao_jax.evaluation.suite_episodes import SuiteEpisode, read_episodes
from sao_jax.evaluation.suite_result import pass_at_k, summarize
from sao_jax.interrupt import Interrupted
from sao_jax.parallel.process import DataShare
from sao_jax.run_lock import run_lock


@pytest.fixture(scope="module")
def published(tmp_path_factory):
  pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
  return suite_toy.publish(tmp_path_factory.mktemp("published"))


def test_the_suites_have_the_runs_and_turns_of_the_paper():
  questions = {name: (suite.runs, suite.max_turns) for name, suite in SUITES.items() if suite.kind == "questions"}
  assert questions == {
    "aime25": (16, 50), "beyondaime": (4, 50), "hmmt_nov_2025": (16, 50), "imo_answerbench": (16, 50)
  }  # fmt: skip
  assert SUITES["swe_bench_verified"].max_turns == 300

  # The table for users has the same, and where each is published.
  readme = (REPOSITORY / "launch" / "README.md").read_text(encoding="utf-8")
  rows = re.findall(r"^\| `(\w+)` \| (.*) \| (\d+) \| (\d+) \|", readme, re.MULTILINE)
  table = {name: (int(runs), int(turns)) for name, _, runs, turns in rows}
  assert table == {name: (suite.runs, suite.max_turns) for name, suite in SUITES.items()}
  for name, published, _, _ in rows:
    places = [place.removeprefix("hf:") for place in SUITES[name].published]
    assert any(place in published for place in places) or "google-deepmind/superhuman" in published
  with pytest.raises(ConfigError, match="there is no suite 'aime24'.*\n.*Did you mean 'aime25'"):
    find_suite("aime24")


@pytest.mark.parametrize(
  "name", ["aime25", "aime25 opencompass", "hmmt_nov_2025", "beyondaime", "imo_answerbench"]
)  # fmt: skip
def test_the_published_layouts_are_read(published, name, caplog):
  suite = SUITES[name.partition(" ")[0]]
  with caplog.at_level(logging.WARNING):
    found = find_data(suite, str(published[name]))
  count = suite_toy.COUNT + (name == "imo_answerbench")  # with a damaged line
  assert found.count == count
  assert f"{suite.title} has {suite.problems} problems, and {published[name]} has {count}" in caplog.text

  # All problems are held out: none is kept for training.
  config = suite_toy.suite_config(suite_toy.get_config(), suite, found, tools="none")
  prompts = config.environment.prompts(suite_toy.TOKENIZER, "heldout", 0)
  assert [prompts[index].data["question"].strip() for index in range(4)] == [question for question, _ in suite_toy.ROWS]
  assert [str(prompts[index].data["answer"]).strip("$.") for index in (0, 1, 3)] == ["1", "2", "4"]
  assert config.rollout.max_turns == 50 and config.sampler.top_p == 1.0 and config.sampler.top_k == 0
  if not found.split:  # the file itself
    assert find_data(suite, found.path) == found


@pytest.mark.parametrize(
  "name, path, says",
  [
    ("aime25", "", "it is missing: the files of AIME 2025.*hf download --repo-type=dataset math-ai/aime25"),
    ("aime25", "none", "none is not there.*https://huggingface.co/datasets/math-ai/aime25.*opencompass/AIME2025"),
    ("hmmt_nov_2025", ".", r"has no data/train-\*\.parquet.*MathArena/hmmt_nov_2025"),
    ("imo_answerbench", ".", "answerbench_v2.csv.*github.com/google-deepmind/superhuman/blob/main/imobench"),
    ("beyondaime", "other.jsonl", "no records with 'problem' and 'answer'.*ByteDance-Seed/BeyondAIME"),
  ],
)
def test_what_is_not_there_says_where_it_is_published(tmp_path, monkeypatch, name, path, says):
  monkeypatch.chdir(tmp_path)
  suite_toy.write_lines(tmp_path / "other.jsonl", [{"text": "x"}])
  with pytest.raises(ConfigError, match=f"(?s){says}") as error:
    find_data(SUITES[name], path)
  assert error.value.field == "--suite_data" and "--suite_data=" in error.value.remedy


def by_hand(runs):
  """The table of successes of the scripted sampler, problems x runs."""
  return np.array([[suite_toy.is_right(problem, run) for run in range(runs)] for problem in range(4)])


def test_the_numbers_of_a_scripted_policy_are_those_computed_by_hand(published, tmp_path):
  result = suite_toy.run(published["aime25"], tmp_path / "a", 8)
  table = by_hand(8)
  assert 0 < table.sum() < table[1:].size and not table[0].any() and table[3].all()
  assert result.mean == pytest.approx(table.mean()) and result.run_means == pytest.approx(table.mean(0))
  assert result.standard_error == pytest.approx(table.mean(0).std(ddof=1) / math.sqrt(8))
  assert {k: result.avg_at[k] for k in (1, 2, 4, 8)} == pytest.approx({k: table[:, :k].mean() for k in (1, 2, 4, 8)})

  # pass@k by listing all choices of k runs.
  for k in (1, 2, 4, 8):
    chosen = [[row[list(each)].any() for each in itertools.combinations(range(8), k)] for row in table]
    assert result.pass_at[k] == pytest.approx(np.mean([np.mean(row) for row in chosen]))

  # The answer, its end, and the letters before it, of which there are more in later runs.
  assert result.per_episode == pytest.approx({"tokens": 3 + 3.5, "turns": 1, "tool_calls": 0, "tool_errors": 0})
  assert (result.graded, result.ungraded, result.skipped, set(result.truncated.values())) == (32, 0, 0, {0.0})
  assert "AIME 2025: 4 problems, 8 runs" in result.table() and f"{table.mean():.4f}" in result.table()
  assert json.loads(json.dumps(result.record()))["pass_at_k"]["8"] == pytest.approx(0.75)


def test_golden_values_of_pass_at_k():
  """By counting: of 10 trials with 3 successes, C(7, 5) = 21 of C(10, 5) = 252 choices have none."""
  assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
  assert pass_at_k(16, 1, 1) == pytest.approx(1 / 16) and pass_at_k(16, 1, 16) == 1.0
  assert pass_at_k(200, 3, 100) == pytest.approx(1 - (100 * 99 * 98) / (200 * 199 * 198))
  assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 5, 1) == 1.0
  for wrong in ((4, 5, 1), (4, 1, 0), (4, 1, 5)):
    with pytest.raises(ValueError, match="say nothing"):
      pass_at_k(*wrong)


def test_what_has_no_grade_enters_no_number_and_is_counted():
  def episode(problem, run, reward):
    kind = {None: "failed", "skip": "skipped"}.get(reward, "graded")
    return SuiteEpisode(problem, run, kind, reward if kind == "graded" else None, "truncated(turns)")

  rewards = {0: (1.0, 0.0, None), 1: (1.0, 1.0, 0.5), 2: ("skip",) * 3, 3: (1.0, 1.0, 1.0)}
  episodes = [episode(problem, run, reward) for problem, row in rewards.items() for run, reward in enumerate(row)]
  damaged = SuiteEpisode(7, 0, "skipped")
  result = summarize(SUITES["aime25"], [*episodes, damaged, episode(0, 9, 1.0)], 3)
  assert (result.problems, result.graded, result.ungraded, result.skipped) == ((0, 1, 3), 8, 1, 2)
  assert result.mean == pytest.approx((1 / 2 + 2 / 3 + 1) / 3) and result.run_means == pytest.approx((1, 2 / 3, 1 / 2))
  assert result.pass_at[2] == 1.0 and math.isnan(result.pass_at[3])  # of one problem there are two grades
  assert result.truncated == {"length": 0.0, "turns": 1.0, "context": 0.0}
  one = summarize(SUITES["aime25"], [episode(0, 0, 1.0)], 1)
  assert one.mean == 1.0 and math.isnan(one.standard_error)
  nothing = summarize(SUITES["aime25"], [], 2)
  assert math.isnan(nothing.mean) and nothing.record()["episodes"] == 0 and "0 problems" in nothing.table()


def test_answers_that_cannot_be_read_and_damaged_lines_are_counted_as_skipped_problems(published, tmp_path):
  pytest.importorskip("math_verify", reason="the extra `envs` is not installed")
  result = suite_toy.run(published["imo_answerbench"], tmp_path, 2, suite="imo_answerbench", scorer="math")
  assert result.problems == (0, 1, 3) and result.skipped == 2 and result.graded == 6
  assert result.mean == pytest.approx(by_hand(2)[[0, 1, 3]].mean())
  reasons = {episode.reason for episode in read_episodes(tmp_path).values() if episode.outcome == "skipped"}
  assert len(reasons) == 1 and "cannot read" in reasons.pop()


def test_a_suite_that_was_killed_goes_on_and_has_the_result_of_one_go(published, tmp_path):
  """Killed again and again, with half a line at the end; nothing is run twice."""
  data, folder, runs = published["aime25"], tmp_path / "killed", 12
  whole = suite_toy.run(data, tmp_path / "whole", runs)
  file, variables = folder / "episodes.0.jsonl", environment(PYTHONPATH=f"{NO_TORCH}:{REPOSITORY}:{TESTS}")
  for least in (5, 20):
    script = [str(TESTS / "toys" / "suite_toy.py"), str(data), str(folder), str(runs)]
    with (tmp_path / "log").open("w") as log:
      process = fork_server.start(*script, environment=variables, cwd=TESTS, log=log)
    deadline = time.monotonic() + 60
    while not file.exists() or file.read_bytes().count(b"\n") <= least:
      assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
      time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    with file.open("ab") as torn:
      torn.write(b'{"problem": 3, "ru')

  done = len(read_episodes(folder))
  assert 20 <= done < 4 * runs
  sampler = FakeSampler(reply=suite_toy.reply, version=7)
  assert suite_toy.run(data, folder, runs, sampler=sampler) == whole
  assert len(sampler.requests) == 4 * runs - done
  again = FakeSampler(reply=suite_toy.reply, version=7)
  assert suite_toy.run(data, folder, runs, sampler=again) == whole and not again.requests

  # More runs add to what there is; another seed is another evaluation, and is refused by name.
  assert suite_toy.run(data, folder, runs + 1, sampler=again).graded == 4 * (runs + 1) and len(again.requests) == 4
  other = suite_toy.training_toy.replace(suite_toy.get_config(), evaluation={"seed": 5})
  with pytest.raises(ConfigError, match=r"episodes with seed=20260729, not 5.*\n.*move .* away"):
    suite_toy.run(data, folder, runs, config=other)


def test_what_failed_is_tried_again_and_an_interruption_keeps_what_has_ended(published, tmp_path):
  class Broken(FakeSampler):
    async def generate(self, request):
      if request.rollout_id == 6 and not self.mended:
        return suite_toy.completion([1], version=7, logprobs=[math.nan])  # evidence that cannot be trusted
      return await super().generate(request)

  sampler = Broken(reply=suite_toy.reply, version=7)
  sampler.mended = False
  first = suite_toy.run(published["aime25"], tmp_path, 2, sampler=sampler)
  assert (first.graded, first.ungraded) == (7, 1)
  sampler.mended, sampler.requests = True, []
  second = suite_toy.run(published["aime25"], tmp_path, 2, sampler=sampler)
  assert (second.graded, second.ungraded) == (8, 0) and [each.rollout_id for each in sampler.requests] == [6]

  class Stop:
    requested = True

  slow = FakeSampler(reply=suite_toy.reply, delay=lambda rollout_id: 0.0 if rollout_id < 10 else 60.0, version=7)
  with pytest.raises(Interrupted):
    suite_toy.run(published["aime25"], tmp_path, 3, sampler=slow, interrupt=Stop())
  assert 8 <= len(read_episodes(tmp_path)) < 12


def test_one_command_at_a_time_runs_the_episodes_of_a_folder(published, tmp_path):
  config = suite_toy.training_toy.replace(suite_toy.get_config(), training={"lock_seconds": 0.0})
  with run_lock(tmp_path, patience=0.0), pytest.raises(ConfigError, match="another run .* holds"):
    suite_toy.run(published["aime25"], tmp_path, 1, config=config)
  assert not read_episodes(tmp_path)
  assert suite_toy.run(published["aime25"], tmp_path, 1, config=config).graded == 4


def test_several_processes_share_the_episodes(published, tmp_path):
  whole = suite_toy.run(published["aime25"], tmp_path / "whole", 4)
  samplers = [FakeSampler(reply=suite_toy.reply, version=7) for _ in range(2)]

  def part(processes):
    share = DataShare(processes.index, 2)
    given = {"sampler": samplers[processes.index], "processes": processes, "share": share}
    return suite_toy.run_here(published["aime25"], tmp_path / "shared", 4, **given)

  with suite_toy.samplers():
    assert together(SharedStore(), 2, part) == [whole, None]
  assert [len(sampler.requests) for sampler in samplers] == [8, 8]


def test_episodes_in_a_bucket_are_gone_on_with_on_another_machine(published, tmp_path, monkeypatch):
  _, variables = bucket_toy.of_this_process()
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  data, folder = published["aime25"], expand("gs://bucket/runs/suites/suite_aime25_3")
  asked = []
  for machine, runs in (("a", 2), ("b", 3)):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
    sampler = FakeSampler(reply=suite_toy.reply, version=7)
    found = suite_toy.run(data, folder, runs, sampler=sampler)
    asked.append(len(sampler.requests))
  assert asked == [8, 4] and found == suite_toy.run(data, tmp_path / "disk", 3)
