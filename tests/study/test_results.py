"""Published results: what is written is read back, survives kills and lost folders, and decides the claims."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
from toys.paths import ABSOLUTE_PATH, REPOSITORY
from toys.study_toy import STUDY, SUITES, FakeLaunch, write_run

from sao_jax.errors import ConfigError, RunError
from sao_jax.report.metrics import to_json
from sao_jax.study import draw_curves, load_results, load_study, run_study, write_study_report
from sao_jax.study.claims import NO, NOT_RUN, UNSEEN, YES, Claim, claims_page, load_claims, verdict
from sao_jax.study.run_lines import POINTS
from sao_jax.study.study_report import table

PUBLISHED = REPOSITORY / "notebooks/results"


@pytest.fixture
def published(tmp_path):
  run_study(STUDY, tmp_path / "runs", launch=FakeLaunch())
  write_study_report(STUDY, tmp_path / "runs", tmp_path / "results/toy")
  return tmp_path


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".png"}


def test_what_is_published_is_read_back(published):
  results = load_results(published / "results/toy")
  assert len(results.runs) == 6 and results.table["baseline"] == "sao"
  run = next(run for run in results.runs if (run.variant, run.seed) == ("grpo", 2))
  assert run.fields["training.steps"] == 4 and run.fields["algorithm.advantage"] == "grpo" and len(run.commit) >= 40
  assert run.costs["updates"] == 4 and run.measures == {"heldout_success": pytest.approx(0.9)}
  assert run.series("explained_variance").x.tolist() == [1, 2, 3, 4]
  assert run.series("explained_variance", "tokens").x.tolist() == [100, 200, 300, 400]
  np.testing.assert_allclose(run.series("explained_variance").y, 0.9 * np.arange(1, 5) / 4)
  np.testing.assert_allclose(run.series("rejected_low+rejected_high").y, 0.03)
  assert run.series("heldout_success") == (pytest.approx([4.0]), pytest.approx([0.9]))
  assert not len(run.series("entropy").x)

  assert results.row("sao")["measures"]["heldout_success"]["mean"] == pytest.approx(0.6)
  with pytest.raises(KeyError, match="vapo"):
    results.row("vapo")
  curves = results.curves("explained_variance")
  assert {name: len(series) for name, series in curves.items()} == {"sao": 3, "grpo": 3}
  assert len(draw_curves("explained_variance", curves).axes[0].lines) == 2
  with pytest.raises(ConfigError, match=r"has no table\.json"):
    load_results(published)


def test_long_curves_are_kept_as_means_of_neighbours(tmp_path):
  launch = lambda arguments, log: write_run(log.parent, 1.0, steps=100) if arguments[0] == "launch.train" else 0
  study = dataclasses.replace(STUDY, variants={"sao": {}}, seeds=(0,), start=())
  run_study(study, tmp_path, launch=launch)
  write_study_report(study, tmp_path, tmp_path / "out")
  series = load_results(tmp_path / "out").runs[0].series("explained_variance")
  assert len(series.x) == 34 <= POINTS and series.x[:2].tolist() == [2.0, 5.0] and series.x[-1] == 100.0
  np.testing.assert_allclose(series.y, series.x / 100)


def test_a_study_that_was_stopped_and_goes_on_publishes_the_same(published, tmp_path):
  """Two variants of three seeds in one go, or some of them at a time, published in between."""
  output, folder = tmp_path / "again", tmp_path / "results/again"
  for launch in (FakeLaunch(fails=[str(output / "sao/seed_1"), str(output / "grpo/seed_0")]), FakeLaunch()):
    run_study(STUDY, output, launch=launch)
    write_study_report(STUDY, output, folder)
  assert contents(folder) == contents(published / "results/toy")


@pytest.mark.parametrize("change", [{"fields": {"training.steps": 77}}, {"config": "configs/corridor.py"}])
def test_runs_of_other_settings_are_not_published_as_those_of_a_study(published, change):
  with pytest.raises(RunError, match=f"was made with other {next(iter(change))}"):
    write_study_report(dataclasses.replace(STUDY, **change), published / "runs", published / "other")
  assert not (published / "other").exists()


def test_published_runs_outlive_their_folders_but_not_a_change_of_their_fields(published):
  folder, runs = published / "results/toy", published / "runs"
  before = contents(folder)
  shutil.rmtree(runs / "grpo")
  write_study_report(STUDY, runs, folder)
  assert contents(folder) == before

  changed = dataclasses.replace(STUDY, variants={"sao": {}, "grpo": {"algorithm.advantage": "dr_grpo"}})
  write_study_report(changed, runs, folder)
  assert {run.variant for run in load_results(folder).runs} == {"sao"}
  assert "3 of 6 runs are not done" in (folder / "table.md").read_text()


def row(mean, low, high, seeds=5, difference=None):
  interval = {"mean": mean, "low": low, "high": high}
  return {"variant": "k1", "seeds": [*range(seeds)], "measures": {"ev": interval}, "differences": {"ev": interval}}


@pytest.mark.parametrize(
  "interval, expected, than, said",
  [
    ((-0.2, -0.3, -0.1), "lower", None, YES),
    ((-0.2, -0.3, -0.1), "higher", None, NO),
    ((-0.2, -0.3, 0.01), "lower", None, UNSEEN),
    ((0.5, 0.4, 0.6), "higher", 0.3, YES),
    ((0.5, 0.4, 0.6), "higher", 0.7, NO),
    ((0.5, 0.4, 0.6), "lower", 0.5, UNSEEN),
    ((0.5, None, None), "higher", 0.0, NOT_RUN),
  ],
)
def test_the_interval_alone_decides_a_claim(interval, expected, than, said):
  claim = Claim("K = 1 explains less", ".25", "critic", "k1", "ev", expected, than)
  assert verdict(claim, row(*interval)) == said
  assert verdict(claim, row(*interval, seeds=4)) == verdict(claim, None) == NOT_RUN


def test_a_difference_is_decided_by_the_seeds_that_both_have():
  compared = Claim("GRPO ends below SAO", "", "toy", "grpo", "ev", "lower")
  alone = dataclasses.replace(compared, than=0.5)
  own, few = row(-0.2, -0.3, -0.1), row(0.3, 0.2, 0.4, seeds=2)
  assert (verdict(compared, own, own), verdict(compared, own, few), verdict(alone, own, few)) == (YES, NOT_RUN, YES)


def test_the_page_of_claims_has_the_figures_of_the_tables(published):
  claims = (
    Claim("Groups win", "no", "toy", "grpo", "heldout_success", "higher"),
    Claim("SAO learns", "97", "toy", "sao", "heldout_success", "higher", than=0.5),
    Claim("Nobody ran this", "", "missing", "sao", "heldout_success", "higher"),
  )
  page = claims_page(claims, published / "results")
  assert "`grpo`, heldout_success: 0.800 [" in page and "less `sao`: 0.200 [0.200, 0.200] | not run yet |" in page
  assert "higher than 0.5? | not run yet |" in page and "| Nobody ran this |  |  | not run yet | missing |" in page
  assert "| [toy](toy/table.md) | calculator | 2 | 6 | 4 | 2 | 0 | 0 |" in page and "| missing | | | 0 |" in page


def test_the_page_of_claims_is_that_of_the_published_tables():
  claims = load_claims(REPOSITORY / "configs/studies/claims.py")
  studies = {path.stem: load_study(path) for path in SUITES}
  for claim in claims:
    study = studies[claim.study]
    assert claim.variant in study.variants and claim.measure in study.measures, claim
    assert claim.than is not None or claim.variant != study.compared_with, claim
  page = (PUBLISHED / "README.md").read_text(encoding="utf-8")
  assert page == claims_page(claims, PUBLISHED), "launch.report --claims writes it anew"


@pytest.mark.parametrize("folder", sorted(path.parent for path in PUBLISHED.glob("*/table.json")), ids=lambda x: x.name)
def test_published_tables_are_those_of_their_runs(folder):
  """Nothing in them names a machine, and every figure follows from the lines of the runs."""
  study = load_study(REPOSITORY / f"configs/studies/{folder.name}.py")
  results, before = load_results(folder), contents(folder)
  assert results.table["study"] == study.name == folder.name
  for text in before.values():
    assert not ABSOLUTE_PATH.search(text.decode())
  for picture in folder.glob("*.png"):
    assert picture.stat().st_size < 200_000

  assert to_json(table(study, results.runs)) == results.table
