"""The report of a study: a line for each run, a table with intervals over seeds, and pictures."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.report.metrics import to_json
from sao_jax.study.bootstrap import Interval, difference_interval, mean_interval
from sao_jax.study.costs import Costs
from sao_jax.study.overlay import write_pictures
from sao_jax.study.plan import Study
from sao_jax.study.run_lines import RunLine, line_of, read_lines, write_lines
from sao_jax.study.series import Axis
from sao_jax.study.study_runs import done_record

RUNS, TABLE, PAGE = "runs.jsonl", "table.json", "table.md"
UNKNOWN = Interval(*[float("nan")] * 3)


def write_study_report(
  study: Study, output: pathlib.Path, folder: pathlib.Path | None = None, *, axis: Axis = "steps"
) -> pathlib.Path:
  """Writes `runs.jsonl`, `table.json`, `table.md` and the study's pictures; returns the Markdown file.

  Runs that are not done are left out, and the table says how many. Runs that the folder has from before, made with the
  fields of today, stay in it, even where their own folders are gone.

  Args:
    study: its runs.
    output: the study's folder.
    folder: where to write; None: `output/report`.
    axis: of the pictures.

  Raises:
    ConfigError: no run is done.
    RunError: one was made with other settings than the study's.
  """
  folder = folder or output / "report"
  lines = _done(study, output, read_lines(folder / RUNS))
  if not lines:
    raise ConfigError("--output", f"{output} has no run that is done.", "Run the study first.")
  folder.mkdir(parents=True, exist_ok=True)
  write_lines(folder / RUNS, lines)

  # What the lines say together; what is undefined is null in JSON, which has no NaN.
  result = table(study, lines)
  (folder / TABLE).write_text(json.dumps(to_json(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")
  groups = {variant: [line for line in lines if line.variant == variant] for variant in study.variants}
  read = lambda line, metric: line.series(metric, axis)
  pictures = write_pictures(groups, read, folder, metrics=study.pictures, axis=axis)
  (folder / PAGE).write_text(_markdown(result, [path.name for path in pictures]), encoding="utf-8")
  return folder / PAGE


def _done(study: Study, output: pathlib.Path, before: Sequence[RunLine]) -> list[RunLine]:
  """Reads the runs that are done, in the study's order, and takes those of `before` that are not in `output`."""
  known = {(line.variant, line.seed): line for line in before}
  lines = []
  for run in study.runs:
    record, old = done_record(study, run, output), known.get(run)
    if record is not None:
      lines.append(line_of(output / run.folder, record, study.measures, study.pictures))
    elif old is not None and old.fields == to_json(study.fields_of(run.variant)):
      lines.append(old)
  return lines


def table(study: Study, lines: Sequence[RunLine]) -> dict[str, Any]:
  """Returns the study and a row for each variant: its measures, their differences from the baseline, and its costs."""
  runs = {variant: {line.seed: line for line in lines if line.variant == variant} for variant in study.variants}
  baseline = runs[study.compared_with]
  rows = []
  for variant, own in runs.items():
    if not own:
      continue
    # Only seeds that both have say something about the difference. Costs are no claim, and have no interval.
    pairs = [(own[seed], baseline[seed]) for seed in own if seed in baseline]
    costs = {name: sum(line.costs[name] or 0.0 for line in own.values()) / len(own) for name in Costs._fields}
    rows.append(
      {
        "variant": variant,
        "fields": study.variants[variant],
        "seeds": [*own],
        "missing": len(study.seeds) - len(own),
        "measures": {name: mean_interval(_values(own.values(), name))._asdict() for name in study.measures},
        "differences": {name: _difference(pairs, name)._asdict() for name in study.measures},
        "costs": costs,
      }
    )
  return {
    "study": study.name,
    "question": study.question,
    "config": study.config,
    "fields": study.fields,
    "baseline": study.compared_with,
    "seeds": study.seeds,
    "variants": list(study.variants),
    "measures": study.measures,
    "commits": sorted({line.commit for line in lines}),
    "rows": rows,
  }


def _difference(pairs: Sequence[tuple[RunLine, RunLine]], measure: str) -> Interval:
  if not pairs:
    return UNKNOWN
  first, second = zip(*pairs, strict=True)
  return difference_interval(_values(first, measure), _values(second, measure))


def _values(lines: Any, measure: str) -> list[float]:
  """The values of runs, NaN where they are undefined, or were published before the study had this measure."""
  values = [line.measures.get(measure) for line in lines]
  return [float("nan") if value is None else value for value in values]


def shown(interval: Mapping[str, float | None]) -> str:
  """Writes a mean with its interval as the tables do; a dash for what is undefined."""
  mean, low, high = (interval[name] for name in Interval._fields)
  if mean is None or mean != mean:
    return "–"
  digits = 4 if abs(mean) < 0.1 else 3 if abs(mean) < 10 else 1
  known = low is not None and low == low
  return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]" if known else f"{mean:.{digits}f}"


def _markdown(result: Mapping[str, Any], pictures: Sequence[str]) -> str:
  """The tables of values, of differences, and of costs."""
  rows, measures = result["rows"], result["measures"]
  missing = len(result["seeds"]) * len(result["variants"]) - sum(len(row["seeds"]) for row in rows)
  lines = [f"# {result['study']}", "", result["question"], "", *_header("variant", "seeds", *measures)]
  lines += [_row([row["variant"], str(len(row["seeds"])), *_cells(row["measures"], measures)]) for row in rows]
  if missing:
    lines += ["", f"{missing} of {len(result['seeds']) * len(result['variants'])} runs are not done."]

  # Equal seeds share their start.
  others = [row for row in rows if row["variant"] != result["baseline"]]
  if others:
    lines += ["", f"Differences from `{result['baseline']}`, seed by seed:", "", *_header("variant", *measures)]
    lines += [_row([row["variant"], *_cells(row["differences"], measures)]) for row in others]
  lines += ["", "Means over seeds with 95 % bootstrap intervals.", "", "Costs of a run, and how stale its tokens were:"]
  lines += ["", *_header("variant", "updates", "trajectories", "sampled tokens", "seconds", "mean lag", "rejected")]
  for row in rows:
    costs = row["costs"]
    cells = (f"{costs[name]:.3g}" for name in ("trajectories", "sampled_tokens", "seconds"))
    ends = (f"{costs['lag_mean']:.1f}", f"{costs['rejected']:.2%}")
    lines.append(_row([row["variant"], f"{costs['updates']:.0f}", *cells, *ends]))
  return "\n".join([*lines, "", *(f"![{name}]({name})" for name in pictures)]) + "\n"


def _cells(intervals: Mapping[str, Any], measures: Sequence[str]) -> list[str]:
  return [shown(intervals[name]) for name in measures]


def _header(*cells: str) -> list[str]:
  return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"
