"""Studies: what is run, what goes on, what is shared, and what the tables say."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time

import numpy as np
import pytest
from toys.paths import REPOSITORY
from toys.study_toy import STUDY, SUITES, FakeLaunch, write_run

from launch import _flags
from sao_jax.configuration import config_tree
from sao_jax.configuration.relations import validate
from sao_jax.errors import ConfigError
from sao_jax.interrupt import POLL, Interrupted
from sao_jax.study.bootstrap import difference_interval, mean_interval
from sao_jax.study.costs import costs_of
from sao_jax.study.measures import value_of
from sao_jax.study.overlay import write_overlay
from sao_jax.study.plan import Study, load_study
from sao_jax.study.series import Series, on_one_grid, read_series
from sao_jax.study.study_report import write_study_report
from sao_jax.study.study_runs import RECORD, Processes, read_record, run_study


def test_all_runs_are_made_once_from_starts_that_their_seeds_share(tmp_path):
  launch = FakeLaunch()
  results = run_study(STUDY, tmp_path, jobs=3, launch=launch)
  assert results == {run.folder: "done" for run in STUDY.runs} and len(results) == 6
  programs = [program for program, _ in launch.calls]
  assert {name: programs.count(name) for name in set(programs)} == {
    "launch.sft": 3, "launch.pretrain_value": 3, "launch.train": 6,
  }  # fmt: skip
  trained = {flags["workdir"]: flags for program, flags in launch.calls if program == "launch.train"}
  grpo = trained[str(tmp_path / "grpo/seed_1")]
  assert (
    grpo["seed"] == "1" and grpo["config.training.steps"] == "4" and grpo["config.algorithm.epsilon_high"] == "0.28"
  )
  record = read_record(tmp_path / "grpo/seed_1")
  assert (record["variant"], record["seed"], record["updates"], record["sampled_tokens"]) == ("grpo", 1, 4, 400)
  assert record["seconds"] == 2.0 and record["tokens_per_second"] == 200.0 and record["rejected"] == pytest.approx(0.03)

  # Nothing is done twice; other fields are refused, since half of a run would be one thing and half another.
  run_study(STUDY, tmp_path, launch=launch)
  assert len(launch.calls) == 12
  changed = Study(**{**vars(STUDY), "fields": {"training.steps": 5}})
  assert all("made with other fields" in problem for problem in run_study(changed, tmp_path, launch=launch).values())
  changed = dataclasses.replace(changed, variants={"more": {}})
  assert all("was made with other" in problem for problem in run_study(changed, tmp_path, launch=launch).values())
  moved = dataclasses.replace(STUDY, config="configs/online_learning.py")
  assert all("made with other config" in problem for problem in run_study(moved, tmp_path, launch=launch).values())


def test_a_failed_run_stops_no_other_and_is_tried_again(tmp_path):
  launch = FakeLaunch(fails=[str(tmp_path / "sao/seed_1")])
  results = run_study(STUDY, tmp_path, jobs=2, launch=launch)
  assert "status 3" in results.pop("sao/seed_1") and set(results.values()) == {"done"}
  report = write_study_report(STUDY, tmp_path).read_text()
  assert "1 of 6 runs are not done" in report
  launch.fails.clear()
  assert set(run_study(STUDY, tmp_path, launch=launch).values()) == {"done"}


def test_a_start_that_fails_fails_its_seed_once(tmp_path):
  launch = FakeLaunch(fails=["launch.sft"])
  results = run_study(STUDY, tmp_path, launch=launch)
  assert all("launch.sft of seed" in problem for problem in results.values()) and len(launch.calls) == 3


def test_an_interrupted_study_ends_and_goes_on(tmp_path):
  launch = FakeLaunch()
  stop = type("Stop", (), {"requested": False})()

  def interrupting(arguments, log):
    if len(launch.calls) >= 4:
      stop.requested = True
      time.sleep(2 * POLL)
    return launch(arguments, log)

  with pytest.raises(Interrupted):
    run_study(STUDY, tmp_path, launch=interrupting, interrupt=stop)
  assert 0 < sum((tmp_path / run.folder / RECORD).exists() for run in STUDY.runs) < 6
  assert set(run_study(STUDY, tmp_path, launch=launch).values()) == {"done"}
  assert [program for program, _ in launch.calls].count("launch.sft") == 3


def test_stopping_ends_the_processes_that_run_and_takes_no_new_ones(tmp_path):
  processes, statuses = Processes(), []
  serve = ("http.server", "0", "--bind", "127.0.0.1")
  thread = threading.Thread(target=lambda: statuses.append(processes(serve, tmp_path / "log.txt")))
  thread.start()
  while not processes._running:
    time.sleep(0.01)
  processes.stop()
  thread.join(30)
  assert statuses == [-15] and processes(serve, tmp_path / "log.txt") == -1


def test_the_table_has_means_intervals_and_differences_of_equal_seeds(tmp_path):
  run_study(STUDY, tmp_path, launch=FakeLaunch())
  page = write_study_report(STUDY, tmp_path)
  rows = {row["variant"]: row for row in json.loads((tmp_path / "report/table.json").read_text())["rows"]}
  own = rows["grpo"]["measures"]["heldout_success"]
  assert rows["sao"]["measures"]["heldout_success"]["mean"] == pytest.approx(0.6) and own["low"] < 0.8 < own["high"]
  level = pytest.approx(0.2)
  assert rows["grpo"]["differences"]["heldout_success"] == {"mean": level, "low": level, "high": level}
  assert rows["grpo"]["costs"]["updates"] == 4 and rows["grpo"]["costs"]["rejected"] == pytest.approx(0.03)
  text = page.read_text()
  assert "| grpo | 3 | 0.800 [" in text and "| grpo | 0.200 [0.200, 0.200]" in text
  assert "![heldout_success.png]" in text
  assert (tmp_path / "report/heldout_success.png").read_bytes().startswith(b"\x89PNG")


def test_a_cold_variant_gets_no_pretrained_critic_and_studies_share_their_runs(tmp_path):
  launch = FakeLaunch()
  run_study(STUDY, tmp_path, launch=launch)
  other = dataclasses.replace(STUDY, name="other", variants={"sao": {}, "sao_cold": {}}, cold=("sao_cold",))
  assert set(run_study(other, tmp_path, launch=launch).values()) == {"done"}
  again = [flags["workdir"] for program, flags in launch.calls[12:]]
  assert again == [str(tmp_path / f"sao_cold/seed_{seed}") for seed in STUDY.seeds]


def test_what_is_undefined_is_null_in_the_table(tmp_path):
  """A method without a critic has no explained variance, and one seed no interval; JSON knows no NaN."""
  study = dataclasses.replace(STUDY, seeds=(0,), measures=("explained_variance", "nothing"), variants={"grpo": {}})
  run_study(study, tmp_path, launch=FakeLaunch())
  write_study_report(study, tmp_path)
  refuse = lambda name: pytest.fail(f"{name} is no JSON")
  (row,) = json.loads((tmp_path / "report/table.json").read_text(), parse_constant=refuse)["rows"]
  assert row["measures"]["nothing"] == {"mean": None, "low": None, "high": None}
  assert row["measures"]["explained_variance"]["mean"] > 0.0 and row["measures"]["explained_variance"]["low"] is None
  assert "| – |" in (tmp_path / "report/table.md").read_text()


def test_bootstrap_intervals():
  """Against the normal approximation for many values; exact for the simplest cases."""
  values = np.random.default_rng(0).normal(size=400)
  interval = mean_interval(values)
  half = 1.96 * values.std() / math.sqrt(400)
  assert interval.low == pytest.approx(values.mean() - half, abs=0.01)
  assert interval.high == pytest.approx(values.mean() + half, abs=0.01)
  assert mean_interval([0.3]) == (0.3, pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True))
  assert mean_interval([0.2, 0.4])[1:] == (0.2, 0.4)
  assert difference_interval([1.0, 2.0, 3.0], [0.9, 1.9, 2.9]).low == pytest.approx(0.1)


def test_series_stand_at_updates_tokens_or_seconds(tmp_path):
  write_run(tmp_path, 0.7)
  assert read_series(tmp_path, "explained_variance").x.tolist() == [1, 2, 3, 4]
  assert read_series(tmp_path, "explained_variance", "tokens").x.tolist() == [100, 200, 300, 400]
  assert read_series(tmp_path, "heldout_success", "seconds").x.tolist() == [2.0]
  read = lambda metric: read_series(tmp_path, metric)
  assert value_of("heldout_success", read) == 0.7 and math.isnan(value_of("nothing", read))
  assert costs_of(tmp_path).tokens == 600

  a, b = Series(np.array([0.0, 2.0]), np.array([0.0, 2.0])), Series(np.array([1.0, 3.0]), np.array([5.0, 5.0]))
  x, y = on_one_grid([a, b], points=3)
  assert x.tolist() == [1.0, 1.5, 2.0] and y.tolist() == [[1.0, 1.5, 2.0], [5.0, 5.0, 5.0]]


def test_pictures_of_any_runs(tmp_path):
  for name, level in (("a", 0.2), ("b", 0.6)):
    write_run(tmp_path / name, level)
  groups = {name: [tmp_path / name] for name in ("a", "b")}
  written = write_overlay(groups, tmp_path / "out", metrics=("heldout_success", "missing", "lag_mean"), axis="tokens")
  assert [path.name for path in written] == ["heldout_success.png", "lag_mean.png"]
  with pytest.raises(ConfigError, match="no run has any of missing"):
    write_overlay(groups, tmp_path / "out", metrics=("missing",))


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"variants": {}}, "nothing to run"),
    ({"variants": {"../x": {}}}, "cannot be folders"),
    ({"variants": {"start": {}}}, "cannot be folders"),
    ({"baseline": "sa"}, "Did you mean 'sao'"),
    ({"cold": ("grp",)}, "Did you mean 'grpo'"),
    ({"measures": ("reward_mean:spike",)}, "Did you mean 'spikes'"),
  ],
)
def test_studies_that_cannot_be_run_are_refused(changes, words):
  with pytest.raises(ConfigError, match=words):
    Study(**{**vars(STUDY), **changes})


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_studies_that_are_shipped_set_fields_of_their_configuration(suite):
  study = load_study(suite)
  assert study.name == suite.stem
  config = config_tree.replace(_flags.load_config(study.config), dict(study.fields))
  for fields in study.variants.values():
    validate(config_tree.replace(config, dict(fields)), training=True)


def test_variants_of_one_name_are_equal_in_studies_that_share_their_runs():
  known = {}
  for study in map(load_study, SUITES):
    for name, fields in study.variants.items():
      own = dict(fields) | {"phases": study.start, "cold": name in study.cold}
      assert known.setdefault((study.config, str(study.fields), name), own) == own, (study.name, name)


def test_a_file_without_a_study_is_refused():
  with pytest.raises(ConfigError, match="no get_study"):
    load_study(REPOSITORY / "configs/calculator.py")
