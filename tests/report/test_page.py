"""The report: every panel drawn or honestly empty, one self-contained page, untrusted text escaped."""

from __future__ import annotations

import base64
import json
import re
import sys

import numpy as np
import pytest

from sao_jax.errors import ConfigError
from sao_jax.report.curves import PANELS, figure, smooth
from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.report.page import append_episode, pick_episodes, read_episodes, write_report

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(workdir, num_steps=60):
  rng = np.random.default_rng(0)
  with MetricsWriter(workdir) as writer:
    for step in range(num_steps):
      writer.write(
        step,
        {
          "reward_mean": step / num_steps,
          "rejected_low": 0.003,
          "rejected_high": 0.0,
          "lag_mean": 1.5,
          "lag_max": 4,
          "lag_histogram": np.array([4, 6, 2, 0], np.int32),
          "explained_variance": np.nan if step == 0 else -3.0 + 0.06 * step,
          "policy_grad_norm": abs(rng.normal()) * 0.01,
          "critic_grad_norm": 4.0,
          "trainer_idle_fraction": 0.2,
          "place_idle_fraction": 0.1,
          "sampler_free_fraction": 0.1,
          "response_length_mean": 20.0,
          "policy_version": max(0, step - 10),
        },
      )
      if step % 20 == 0:
        writer.write(step, {"heldout_success": 0.5, "heldout_low": 0.45, "heldout_high": 0.55})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run")
  write_run(workdir)
  (workdir / "config.json").write_text(json.dumps({"name": "calculator <1>"}))
  for step in range(5):
    append_episode(
      workdir,
      "train",
      step,
      1.0,
      "terminated",
      [
        ("prompt", "<|user|>What is 2 + 3?"),
        ("action", f"call {step}<script>alert(1)</script>\x1b[31m"),
        ("observation", "</pre><b>5</b>"),
        ("action", "5"),
      ],
    )
  paths = write_report(workdir)
  return workdir, paths, (workdir / "report" / "index.html").read_text()


def test_one_png_per_panel_and_the_page_first(run):
  workdir, paths, _ = run
  assert paths[0] == workdir / "report" / "index.html"
  assert [path.stem for path in paths[1:]] == [panel.name for panel in PANELS]
  assert len(PANELS) == 8
  for path in paths[1:]:
    assert path.read_bytes().startswith(PNG) and path.stat().st_size > 5000


def test_the_page_is_self_contained(run):
  _, paths, page = run
  embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
  assert [base64.b64decode(image) for image in embedded] == [path.read_bytes() for path in paths[1:]]
  assert not re.search(r'(src|href)="(?!data:)', page) and "@import" not in page and "http" not in page
  assert "<title>calculator &lt;1&gt;" in page


def test_three_episodes_with_observations_marked_and_text_escaped(run):
  _, _, page = run
  assert page.count("<article>") == 3
  assert [int(step) for step in re.findall(r"<h3>Step (\d+)", page)] == [0, 2, 4]
  assert page.count('class="segment observation"') == 3 and page.count('class="segment action"') == 6
  assert "&lt;script&gt;alert(1)&lt;/script&gt;␛[31m" in page and "<script" not in page
  assert "&lt;/pre&gt;&lt;b&gt;5&lt;/b&gt;" in page


def test_the_facts_at_the_top(run):
  _, _, page = run
  for text in ("held-out success, step 0", "held-out success, step 40", "45.0% – 55.0%", "0.30%", "<dd>49 "):
    assert text in page


def test_a_run_without_some_metrics_says_which(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, {"reward_mean": 0.5, "explained_variance": None, "lag_histogram": []})
  page, *images = write_report(tmp_path)
  assert len(images) == 8 and "No episodes were recorded yet" in page.read_text() and tmp_path.name in page.read_text()
  for panel in PANELS:
    (axes,) = figure(panel, read_metrics(tmp_path)).axes
    says = [text.get_text() for text in axes.texts]
    if panel.name == "reward":
      assert not says and axes.get_xlabel() == "train step"
    else:
      assert "not recorded in this run yet" in says[0] and panel.needs[0] in says[0]


def test_alarms_are_listed_with_their_steps_and_nothing_without_them(tmp_path, run):
  _, _, page = run
  assert "Alarms" not in page
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, {"reward_mean": 0.5})
    writer.write(2, {"reward_mean": 0.5, "alarms": ["equal_rewards: <b> nothing to prefer"]})
  page = write_report(tmp_path)[0].read_text()
  assert re.search(r"<h2>Alarms</h2>\s*<ul>\s*<li>Step 2 .*equal_rewards: &lt;b&gt; nothing to prefer", page)


def test_panels_have_labelled_axes_and_a_legend(run):
  workdir, *_ = run
  for panel in PANELS:
    (axes,) = figure(panel, read_metrics(workdir)).axes
    assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title(loc="left") == panel.title
    assert axes.get_legend() is not None


def test_lags_are_shown_by_bins_of_doubling_width():
  (panel,) = (panel for panel in PANELS if panel.name == "lag")
  counts = [1, 1, 0, 0, 0, 0, 0, 0, 0, 2, *[0] * 6]  # two tokens of a lag from 16 to 31
  (axes,) = figure(panel, [{"step": 1, "lag_histogram": counts, "lag_mean": 8.5}]).axes
  assert [bar.get_height() for bar in axes.patches] == [25, 25, *[0] * 7, 50]
  assert [label.get_text() for label in axes.get_xticklabels()][6:] == ["6", "7", "8–15", "16–31"]
  assert "mean lag 8.50" in axes.get_legend().get_texts()[0].get_text()

  # Files of earlier versions have one bin a lag.
  (axes,) = figure(panel, [{"step": 1, "lag_histogram": [3, 1]}]).axes
  assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1"]


@pytest.mark.parametrize("num_steps", [1, 2, 41])
def test_short_runs(tmp_path, num_steps):
  write_run(tmp_path, num_steps)
  assert len(write_report(tmp_path)) == 9


def test_torn_and_foreign_episode_lines_are_skipped(tmp_path):
  append_episode(tmp_path, "train", 1, float("nan"), "truncated(length)", [("prompt", "a")])
  with (tmp_path / "episodes.jsonl").open("a") as file:
    file.write('[1]\n{"step": 2}\n{"step": 3, "segm')
  (episode,) = read_episodes(tmp_path)
  assert episode["reward"] is None and episode["segments"] == [{"kind": "prompt", "text": "a"}]
  assert "reward None" in write_report(tmp_path)[0].read_text()


@pytest.mark.parametrize(
  "count, chosen", [(0, []), (1, [0]), (3, [0, 1, 2]), (4, [0, 2, 3]), (5, [0, 2, 4]), (100, [0, 50, 99])]
)
def test_episodes_are_picked_over_the_whole_run(count, chosen):
  assert [episode["step"] for episode in pick_episodes([{"step": step} for step in range(count)])] == chosen


def test_nothing_to_report_is_refused(tmp_path):
  with pytest.raises(ConfigError, match="holds no metrics of a train phase and no episodes") as error:
    write_report(tmp_path)
  assert "--workdir" in error.value.remedy and not (tmp_path / "report").exists()


@pytest.mark.parametrize("package, module", [("matplotlib", "matplotlib.figure"), ("jinja2", "jinja2")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, module):
  write_run(tmp_path, 1)
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(ConfigError, match=f"{package} is not installed") as error:
    write_report(tmp_path)
  assert "pip install -e '.[report]'" in error.value.remedy


def test_smoothing():
  values = np.array([0.0, 3.0, 0.0, 3.0, 0.0])
  np.testing.assert_allclose(smooth(values, 3), [1.5, 1.0, 2.0, 1.0, 1.5])
  np.testing.assert_allclose(smooth(values, 1), values)
  np.testing.assert_allclose(smooth(np.full(7, 2.0), 5), np.full(7, 2.0))
