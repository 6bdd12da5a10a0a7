"""Published results of a study, read back."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.errors import ConfigError
from sao_jax.study.run_lines import RunLine, read_lines
from sao_jax.study.series import Axis, Series
from sao_jax.study.study_report import RUNS, TABLE


@dataclasses.dataclass(frozen=True)
class Results:
  """A study as it was published.

  Attributes:
    table: table.json: "study", "question", "baseline", "measures", "rows" and more.
    runs: a line for each run.
  """

  table: Mapping[str, Any]
  runs: Sequence[RunLine]

  def row(self, variant: str) -> Mapping[str, Any]:
    """Returns the row of a variant: "seeds", "measures", "differences", "costs".

    Raises:
      KeyError: none of its runs is done.
    """
    for row in self.table["rows"]:
      if row["variant"] == variant:
        return row
    raise KeyError(variant)

  def curves(self, metric: str, axis: Axis = "steps") -> dict[str, list[Series]]:
    """Returns a curve for each run by variant, as `draw_curves` takes them; without variants that have none."""
    found: dict[str, list[Series]] = {}
    for run in self.runs:
      if len((series := run.series(metric, axis)).x):
        found.setdefault(run.variant, []).append(series)
    return found


def load_results(folder: str | os.PathLike) -> Results:
  """Reads what `launch.report --study=... --publish=...` has written.

  Raises:
    ConfigError: there is none.
  """
  folder = pathlib.Path(folder)
  if not (folder / TABLE).is_file():
    raise ConfigError("results", f"{folder} has no {TABLE}.", "Name a folder such as notebooks/results/methods.")
  return Results(json.loads((folder / TABLE).read_text(encoding="utf-8")), read_lines(folder / RUNS))
