"""A metric of one or several runs against steps, tokens or seconds."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

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
  """Reads one metric of a run's training; lines without it, and undefined values, are left out.

  An evaluation stands where the last step before it does.
  """
  x, y = [], []
  version = tokens = seconds = 0.0
  for line in metric_lines(pathlib.Path(workdir), phase):
    tokens += line.get("num_sampled_tokens") or 0.0
    seconds = line.get("seconds") or seconds
    version = line["policy_version"] if line.get("policy_version") is not None else version

    # Arrays and undefined values have no place on a curve.
    value = line.get(metric)
    if isinstance(value, int | float) and np.isfinite(value):
      x.append({"steps": version, "tokens": tokens, "seconds": seconds}[axis])
      y.append(float(value))
  return Series(np.asarray(x, np.float64), np.asarray(y, np.float64))


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
