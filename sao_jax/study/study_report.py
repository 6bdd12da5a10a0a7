"""The report of a study: a table with intervals over seeds, as Markdown and JSON, and its pictures."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.report.metrics import to_json
from sao_jax.study.bootstrap import Interval, difference_interval, mean_interval
from sao_jax.study.overlay import write_overlay
from sao_jax.study.plan import Study
from sao_jax.study.series import Axis, read_series
from sao_jax.study.study_runs import read_record

TAIL = 0.1  # of the updates of a run, whose mean a metric of every step is at its end
COLUMNS = ("explained_variance", "response_length_mean")


def write_study_report(study: Study, output: pathlib.Path, *, axis: Axis = "steps") -> pathlib.Path:
  """Writes `output/report/`: README.md with the table, table.json, and pictures; returns the Markdown file.

  Runs that are not done are left out, and the table says how many.

  Raises:
    ConfigError: no run is done.
  """
  # Runs by variant, as far as they are done.
  runs = {variant: [] for variant in study.variants}
  for run in study.runs:
    if (record := read_record(output / run.folder)) is not None:
      runs[run.variant].append((run.seed, output / run.folder, record))
  done = {variant: found for variant, found in runs.items() if found}
  if not done:
    raise ConfigError("--output", f"{output} has no run that is done.", "Run the study first.")

  rows = summaries(study, done)
  folder = output / "report"
  pictures = write_overlay({name: [path for _, path, _ in found] for name, found in done.items()}, folder, axis=axis)
  # A method without a critic explains no variance: undefined, and null in JSON, which has no NaN.
  numbers = json.dumps(to_json(rows), indent=2, allow_nan=False)
  (folder / "table.json").write_text(f"{numbers}\n", encoding="utf-8")
  text = _markdown(study, rows, [path.name for path in pictures])
  (folder / "README.md").write_text(text, encoding="utf-8")
  return folder / "README.md"


def summaries(study: Study, done: dict[str, list[tuple[int, pathlib.Path, dict[str, Any]]]]) -> list[dict[str, Any]]:
  """Returns a row for each variant: its measure at the end, the difference from the baseline, and its costs."""
  ends = {
    variant: {seed: final_value(path, study.measure) for seed, path, _ in found} for variant, found in done.items()
  }
  baseline = ends.get(study.compared_with, {})
  rows = []
  for variant, found in done.items():
    # Only seeds that both have say something about the difference.
    own, shared = ends[variant], sorted(ends[variant].keys() & baseline.keys())
    pairs = [own[seed] for seed in shared], [baseline[seed] for seed in shared]
    difference = difference_interval(*pairs, paired=True) if shared else Interval(*[float("nan")] * 3)

    # Costs are no claim, and have no interval.
    mean = lambda name, found=found: sum(record[name] for *_, record in found) / len(found)
    rows.append(
      {
        "variant": variant,
        "seeds": sorted(own),
        "missing": len(study.seeds) - len(own),
        study.measure: mean_interval(list(own.values()))._asdict(),
        "difference": difference._asdict(),
        **{
          name: mean_interval([final_value(path, name) for _, path, _ in found])._asdict() for name in _columns(study)
        },
        **{name: mean(name) for name in ("updates", "sampled_tokens", "seconds", "lag_mean", "rejected")},
      }
    )
  return rows


def final_value(workdir: str | os.PathLike, metric: str) -> float:
  """A metric at the end of a run: its last evaluation, or the mean over the last tenth of the updates; NaN if none."""
  series = read_series(workdir, metric)
  if not len(series.x):
    return float("nan")
  if metric.startswith("heldout"):
    return float(series.y[-1])
  return float(series.y[series.x >= series.x[-1] * (1.0 - TAIL)].mean())


def _markdown(study: Study, rows: list[dict[str, Any]], pictures: list[str]) -> str:
  """The table; intervals are of the mean over seeds, by bootstrap, and differences are taken seed by seed."""
  shown = lambda interval: str(Interval(**interval))
  head = [
    "variant",
    "seeds",
    study.measure,
    f"less {study.compared_with}",
    *_columns(study),
    "lag",
    "rejected",
    "tokens",
    "s",
  ]
  lines = [f"# {study.name}", "", study.question, "", _row(head), _row(["---"] * len(head))]

  # One row for each variant.
  for row in rows:
    cells = [row["variant"], str(len(row["seeds"])), shown(row[study.measure]), shown(row["difference"])]
    cells += [shown(row[name]) for name in _columns(study)]
    cells += [
      f"{row['lag_mean']:.1f}",
      f"{row['rejected']:.2%}",
      f"{row['sampled_tokens']:.3g}",
      f"{row['seconds']:.0f}",
    ]
    lines.append(_row(cells))

  missing = sum(row["missing"] for row in rows) + len(study.seeds) * (len(study.variants) - len(rows))
  lines += [
    "",
    "Means over seeds with 95 % bootstrap intervals; differences are those of equal seeds, which share their start.",
  ]
  if missing:
    lines.append(f"{missing} of {len(study.seeds) * len(study.variants)} runs are not done.")
  return "\n".join([*lines, "", *(f"![{name}]({name})" for name in pictures)]) + "\n"


def _columns(study: Study) -> list[str]:
  """The metrics beside the study's measure."""
  return [name for name in COLUMNS if name != study.measure]


def _row(cells: list[str]) -> str:
  return f"| {' | '.join(cells)} |"
