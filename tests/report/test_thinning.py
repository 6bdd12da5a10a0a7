"""The metrics of 100,000 steps are read in bounded memory, and their report shows what they say."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from sao_jax.report.curves import PANELS, figure
from sao_jax.report.metrics import METRICS_FILE, drop_lines_after, evaluated_versions, metric_lines
from sao_jax.report.page import DRAWN, _alarms, _facts
from sao_jax.report.thinning import thinned

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
  """A file of 20 MB: 10,000 steps of 2 kB, and an evaluation every 1000 of them."""
  workdir = tmp_path_factory.mktemp("long")
  padding = ", ".join(f'"metric_{number}": "{"x" * 200}"' for number in range(10))
  with (workdir / METRICS_FILE).open("w") as file:
    for step in range(1, 10_001):
      known = f'"step": {step}, "phase": "train", "reward_mean": {step / 10_000}, "policy_version": {step}'
      file.write(f'{{{known}, "lag_histogram": [1, 1, 0], {padding}}}\n')
      if step % 1000 == 0:
        file.write(f'{{{known}, "heldout_success": 0.5}}\n')
  assert (workdir / METRICS_FILE).stat().st_size > 20 * MEGABYTE
  return workdir


def peak(read) -> float:
  """Megabytes that a call needs at most."""
  tracemalloc.start()
  try:
    read()
    return tracemalloc.get_traced_memory()[1] / MEGABYTE
  finally:
    tracemalloc.stop()


def test_starting_a_run_needs_no_memory_in_proportion_to_its_metrics(long_run):
  versions = []
  assert peak(lambda: versions.extend(evaluated_versions(long_run, "train"))) < 1
  assert sorted(versions) == list(range(1000, 10_001, 1000))
  before = (long_run / METRICS_FILE).stat()
  assert peak(lambda: drop_lines_after(long_run / METRICS_FILE, "train", 10_000)) < 1
  after = (long_run / METRICS_FILE).stat()
  assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)  # nothing to drop: not even copied


def test_lines_are_dropped_one_by_one_and_the_others_stay_as_they_are(tmp_path, long_run):
  path = tmp_path / METRICS_FILE
  whole = (long_run / METRICS_FILE).read_text()
  path.write_text(whole + '{"step": 3,  "phase": "sft"}\n{"step": 4, "pha')
  assert peak(lambda: drop_lines_after(path, "train", 9_999)) < 1
  assert path.read_text() == whole[: whole.index('{"step": 10000,')] + '{"step": 3,  "phase": "sft"}\n'


def test_a_report_keeps_what_it_draws_in_as_many_points_as_a_figure_shows(long_run):
  lines = []
  assert peak(lambda: lines.extend(thinned(metric_lines(long_run, "train"), DRAWN, points=500))) < 2
  steps = [line for line in lines if "heldout_success" not in line]
  assert 250 <= len(steps) <= 501 and len(lines) - len(steps) == 10
  assert set(steps[0]) == {"step", "policy_version", "reward_mean", "lag_histogram"}
  assert steps[-1]["step"] == steps[-1]["policy_version"] == 10_000

  # Means of neighbours, and sums of histograms.
  first = steps[0]
  assert first["reward_mean"] == pytest.approx(np.mean(np.arange(1, first["step"] + 1)) / 10_000)
  assert np.sum([line["lag_histogram"] for line in steps], axis=0).tolist() == [10_000, 10_000, 0]


def test_what_is_undefined_or_missing_in_some_lines_is_merged_from_the_others():
  lines = [
    {"step": 1, "a": None, "b": 2.0, "h": [1, None]},
    {"step": 2, "a": None, "h": [1, 2, 3]},
    {"step": 3, "a": 4.0, "unknown": 1},
    {"step": 4, "a": None},
    {"step": 5, "a": 1.0},
  ]
  assert thinned(iter(lines), {"a", "b", "h"}, points=2) == [
    {"step": 4, "a": 4.0, "b": 2.0, "h": [2, 2, 3]},
    {"step": 5, "a": 1.0},
  ]


class Read(dict):
  """A line that remembers what was read of it."""

  names: set[str] = set()

  def get(self, name, default=None):
    self.names.add(name)
    return super().get(name, default)

  def __getitem__(self, name):
    self.names.add(name)
    return super().__getitem__(name)


def test_everything_that_is_drawn_is_kept():
  line = Read(dict.fromkeys(DRAWN, 0.5) | {"lag_histogram": [1, 2], "step": 1, "policy_version": 1, "alarms": []})
  for panel in PANELS:
    figure(panel, [line, line])
  _facts([line, line])
  _alarms([line, line])
  assert line.names == DRAWN


def test_alarms_keep_their_steps_however_long_the_run():
  lines = [{"step": step, "reward_mean": 0.5} for step in range(1, 2001)]
  lines[776]["alarms"] = ["a", "b"]
  kept = thinned(lines, {"reward_mean", "alarms"}, points=16)
  assert len(kept) < 32 and [line["step"] for line in kept if "alarms" in line] == [777]
