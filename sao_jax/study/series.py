"""A metric of one or several runs against steps, tokens or seconds."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from sao_jax.report.metrics import metric_lines

Axis = Literal["steps", "tokens", "seconds"]
LABELS = {"steps": "policy updates", "tokens": "sampled tokens", "seconds": "seconds"}


class Series(NamedTuple):
  """A metric of a run where it was measured, in order.

  Attributes:
    x: updates, sampled tokens so far, or seconds.
    y: finite values.
  """

  x: Float[np.ndarray, " n"]
  y: Float[np.ndarray, " n"]


def read_series(workdir: str | os.PathLike, metric: str, axis: Axis = "steps", phase: str = "train") -> Series:
  """Reads one metric of a run's training, see `series_of`."""
  return series_of(metric_lines(pathlib.Path(workdir), phase), metric, axis)


def series_of(lines: Iterable[Mapping[str, Any]], metric: str, axis: Axis = "steps") -> Series:
  """Takes one metric, or a sum of several ("rejected_low+rejected_high"), from the metric lines of a phase.

  Lines without it, and undefined values, are left out.
  """
  found = [(place[axis], number(line, metric)) for place, line in placed(lines)]
  pairs = [(x, y) for x, y in found if y is not None]
  return Series(*np.asarray(pairs, np.float64).reshape(-1, 2).T)


def placed(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[dict[Axis, float], Mapping[str, Any]]]:
  """Yields every line with its place on each axis; an evaluation stands where the last step before it does."""
  version = tokens = seconds = 0.0
  for line in lines:
    tokens += line.get("num_sampled_tokens") or 0.0
    seconds = line.get("seconds") or seconds
    version = line["policy_version"] if line.get("policy_version") is not None else version
    yield {"steps": version, "tokens": tokens, "seconds": seconds}, line


def number(line: Mapping[str, Any], metric: str) -> float | None:
  """Returns a metric, or a sum of several, of one line; None for arrays and undefined values."""
  values = [line.get(name) for name in metric.split("+")]
  return float(sum(values)) if all(isinstance(each, int | float) and np.isfinite(each) for each in values) else None


def on_one_grid(
  series: Sequence[Series], points: int = 200
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, "runs P"]]:
  """Puts several runs on one x, which reaches as far as all of them do: where they were measured alike, else linearly.

  Raises:
    ValueError: one of them has no value.
  """
  if not series or any(not len(each.x) for each in series):
    raise ValueError("a run without a value has no curve")

  # Equal steps are compared as they are; others meet where all of them have values.
  first = series[0].x
  if all(np.array_equal(each.x, first) for each in series):
    return first, np.stack([each.y for each in series])
  low, high = max(each.x[0] for each in series), min(each.x[-1] for each in series)
  grid = np.linspace(low, max(low, high), points)
  return grid, np.stack([np.interp(grid, each.x, each.y) for each in series])
