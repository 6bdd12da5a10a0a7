"""A run of a study as one line of JSON: its fields, costs, measures and thinned curves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.report.metrics import metric_lines, to_json
from sao_jax.study.costs import Costs
from sao_jax.study.measures import split_measure, value_of
from sao_jax.study.series import Axis, Series, number, placed, series_of

POINTS = 40  # of a curve: several steps become their mean
DIGITS = 4  # of its numbers
CURVES = (
  *("reward_mean", "explained_variance", "critic_grad_norm", "policy_grad_norm", "response_length_mean", "entropy"),
  *("rejected_low+rejected_high", "lag_mean", "truncated_fraction", "used_over_generated_latency"),
)
HELDOUT = "heldout_success"
_AXES = {"steps": "updates", "tokens": "tokens", "seconds": "seconds"}


@dataclasses.dataclass(frozen=True)
class RunLine:
  """One run as it is published.

  Attributes:
    variant, seed: its name in the study.
    fields: what it set beside its configuration.
    commit: of the code.
    costs: those of `Costs`.
    measures: a value for each measure of the study; None where it is undefined.
    curves: of the steps: columns "updates", "tokens", "seconds" and one for each metric; None where it is undefined.
    evaluations: of the held-out evaluations: the same columns, with "heldout_success".
  """

  variant: str
  seed: int
  fields: Mapping[str, Any]
  commit: str
  costs: Mapping[str, float]
  measures: Mapping[str, float | None]
  curves: Mapping[str, Sequence[float | None]]
  evaluations: Mapping[str, Sequence[float | None]]

  def series(self, metric: str, axis: Axis = "steps") -> Series:
    """Returns a metric against updates, tokens or seconds; empty for one that was not kept."""
    columns = self.evaluations if metric in self.evaluations else self.curves
    pairs = [pair for pair in zip(columns[_AXES[axis]], columns.get(metric, ()), strict=False) if pair[1] is not None]
    x, y = np.asarray(pairs, np.float64).reshape(-1, 2).T
    return Series(x, y)


def line_of(
  workdir: str | os.PathLike, record: Mapping[str, Any], measures: Sequence[str], drawn: Sequence[str] = ()
) -> RunLine:
  """Reads the folder of a run that is done.

  Args:
    workdir: of the run.
    record: its record.
    measures: of the study.
    drawn: metrics whose curves are kept beside those of `CURVES` and of the measures.
  """
  lines = list(metric_lines(pathlib.Path(workdir), "train"))
  pairs = list(placed(lines))
  metrics = dict.fromkeys([*CURVES, *(split_measure(name)[0] for name in measures), *drawn])

  # Curves of the steps in as many windows as are kept; evaluations are few, and all of them are.
  steps = [pair for pair in pairs if "step_seconds" in pair[1]]
  evaluated = [pair for pair in pairs if number(pair[1], HELDOUT) is not None]
  curves = _columns(steps, [name for name in metrics if name != HELDOUT], math.ceil(len(steps) / POINTS))
  evaluations = _columns(evaluated, [HELDOUT], 1)

  read = lambda metric: series_of(lines, metric)
  return RunLine(
    variant=record["variant"],
    seed=record["seed"],
    fields=record["fields"],
    commit=record["commit"],
    costs={name: _rounded(record[name]) for name in Costs._fields},
    measures={name: _rounded(value_of(name, read)) for name in measures},
    curves=curves,
    evaluations=evaluations,
  )


def _columns(
  pairs: Sequence[tuple[Mapping[Axis, float], Mapping[str, Any]]], metrics: Iterable[str], width: int
) -> dict[str, list[float | None]]:
  """Makes the columns of places and metrics, each value the mean over `width` lines; without undefined metrics."""
  places = {name: [place[axis] for place, _ in pairs] for axis, name in _AXES.items()}
  values = {name: [number(line, name) for _, line in pairs] for name in metrics}
  known = {name: column for name, column in values.items() if any(value is not None for value in column)}
  return {name: _means(column, width) for name, column in (places | known).items()}


def _means(values: Sequence[float | None], width: int) -> list[float | None]:
  """Returns the means of neighbours, those that are undefined left out."""
  windows = [values[first : first + width] for first in range(0, len(values), width)] if width else []
  defined = [[value for value in window if value is not None] for window in windows]
  return [_rounded(sum(window) / len(window)) if window else None for window in defined]


def _rounded(value: float) -> float | None:
  """Keeps the digits that anybody looks at; undefined numbers are None, since JSON has no NaN."""
  return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def write_lines(path: pathlib.Path, lines: Iterable[RunLine]) -> None:
  """Writes a line of JSON for each run."""
  text = "".join(json.dumps(to_json(dataclasses.asdict(line)), allow_nan=False) + "\n" for line in lines)
  path.write_text(text, encoding="utf-8")


def read_lines(path: pathlib.Path) -> list[RunLine]:
  """Reads the runs that `write_lines` wrote; none without a file."""
  if not path.exists():
    return []
  return [RunLine(**json.loads(text)) for text in path.read_text(encoding="utf-8").splitlines()]
