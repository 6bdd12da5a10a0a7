"""Runs over one another: a picture for each metric, one line for each run, or one band for each group of runs."""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from sao_jax.errors import ConfigError
from sao_jax.report.curves import smooth
from sao_jax.study.bootstrap import mean_interval
from sao_jax.study.series import LABELS, Axis, Series, on_one_grid, read_series

Run = TypeVar("Run")
METRICS = (
  "heldout_success",
  "reward_mean",
  "explained_variance",
  "response_length_mean",
  "critic_grad_norm",
  "entropy",
)

# Paul Tol's muted palette: nine lines that can be told apart with every common colour vision.
COLORS = ("#332288", "#CC6677", "#117733", "#DDCC77", "#88CCEE", "#AA4499", "#44AA99", "#999933", "#882255")
COLORS_OF_A_PICTURE = 96
DASHES = ("-", "--", ":")  # beyond nine


def write_overlay(
  groups: Mapping[str, Sequence[str | os.PathLike]],
  output: pathlib.Path,
  *,
  metrics: Sequence[str] = METRICS,
  axis: Axis = "steps",
) -> list[pathlib.Path]:
  """Draws `output/METRIC.png` for each metric that any run has; returns the files.

  Args:
    groups: runs by the name of their line; several runs make a mean with its 95 % interval over them.
    output: a folder.
    metrics: of the training phase.
    axis: "steps", "tokens" or "seconds".

  Raises:
    ConfigError: none of the runs has any of the metrics.
  """
  output.mkdir(parents=True, exist_ok=True)
  read = lambda run, metric: read_series(run, metric, axis)
  written = write_pictures(groups, read, output, metrics=metrics, axis=axis)
  if not written:
    asked = ", ".join(metrics)
    raise ConfigError("--metrics", f"no run has any of {asked}.", "Name metrics that stand in their metrics.jsonl.")
  return written


def write_pictures(
  groups: Mapping[str, Sequence[Run]],
  read: Callable[[Run, str], Series],
  output: pathlib.Path,
  *,
  metrics: Sequence[str],
  axis: Axis = "steps",
) -> list[pathlib.Path]:
  """Draws `output/METRIC.png` for each metric that any run has; returns the files.

  Args:
    groups: runs by the name of their line.
    read: gives the curve of a metric of a run.
    output: a folder.
    metrics: their names.
    axis: what `read` gives curves against.
  """
  written = []
  for metric in metrics:
    found = {name: [read(run, metric) for run in runs] for name, runs in groups.items()}
    if any(len(each.x) for series in found.values() for each in series):
      written.append(output / f"{metric.replace('/', '_')}.png")
      _save(draw_curves(metric, found, axis), written[-1])
  return written


def _save(figure: Any, path: pathlib.Path) -> None:
  """Writes a PNG of few colours, a third as large as one of all."""
  from PIL import Image  # comes with matplotlib

  buffer = io.BytesIO()
  figure.savefig(buffer, format="png")
  Image.open(buffer).convert("RGB").quantize(COLORS_OF_A_PICTURE).save(path, optimize=True)


def draw_curves(metric: str, groups: Mapping[str, Sequence[Series]], axis: Axis = "steps") -> Any:
  """Draws one line for each group, the mean over its curves with a band for its 95 % interval; a matplotlib Figure.

  Empty curves, and groups of them, are left out.
  """
  try:
    from matplotlib.figure import Figure  # an optional extra
  except ImportError as error:
    raise ConfigError("report", "matplotlib is not installed.", "Run: pip install -e '.[report]'") from error

  result = Figure(figsize=(7.5, 4.2), dpi=90, layout="constrained")
  axes = result.add_subplot()
  found = {name: [each for each in series if len(each.x)] for name, series in groups.items()}
  for number, (name, series) in enumerate(found.items()):
    if not series:
      continue
    # One colour for each line; beyond nine they repeat in dashes.
    style = {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number // len(COLORS) % len(DASHES)]}
    x, y = on_one_grid(series)
    window = 2 * (len(x) // 40) + 1
    y = np.stack([smooth(row, window) for row in y])
    axes.plot(x, y.mean(axis=0), linewidth=1.8, label=f"{name} ({len(series)})" if len(series) > 1 else name, **style)

    # Where seeds differ, the interval of their mean.
    if len(series) > 1:
      intervals = [mean_interval(column) for column in y.T]
      low, high = ([getattr(each, end) for each in intervals] for end in ("low", "high"))
      axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)

  # Names and numbers.
  axes.set_xlabel(LABELS[axis])
  axes.set_ylabel(metric.replace("_", " "))
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(color="#e5e7eb")
  axes.legend(frameon=False, fontsize=8, loc="best")
  return result
