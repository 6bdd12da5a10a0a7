"""Claims beside results: one row for each claim, with our figure and what it says."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sao_jax.configuration.module_file import load_module
from sao_jax.errors import ConfigError
from sao_jax.study.measures import split_measure
from sao_jax.study.study_report import TABLE, shown

NOT_RUN, YES, NO, UNSEEN = "not run yet", "yes", "no", "not visible at this scale"
SEEDS = 5  # of which a verdict has at least so many
HEAD = """# Claims and results

Written by `python -m launch.report --claims=configs/studies/claims.py --publish=notebooks/results` from the tables in
the folders beside this file. The 95 % interval alone decides: a claim is reproduced if the whole interval lies on the
side that it claims, and is not if it lies on the other side. Differences are taken seed by seed. Bootstrap intervals
of few seeds are too narrow: of five normal values they hold the mean in 85 % of cases, not in 95 %. Rows are not
corrected for their number, so that among as many as here a few verdicts are by chance.
[Studies](../../sao_jax/study/README.md) tells what the measures are, and `python -m launch.study
--suite=configs/studies/STUDY.py --output=runs/CONFIGURATION` runs what a row needs, and goes on with what is missing.
"""
COSTS = """## Costs

On one CPU core that other work shared. Studies of one configuration with the same fields share their runs, so that
core-minutes of runs that several of them have are counted in each.

| study | configuration | variants | runs | updates of a run | seconds of a run | core-minutes | runs missing |
|---|---|---|---|---|---|---|---|"""


@dataclasses.dataclass(frozen=True)
class Claim:
  """A sentence that an interval can hold against: one measure of one variant, against the baseline or a number.

  Attributes:
    text: the claim.
    paper: the paper's own figures.
    study: whose published table decides.
    variant: of the study.
    measure: of the study.
    expected: where the claim says that the figure lies.
    than: a number; None: the study's baseline, seed by seed.
    note: what else was measured that explains the figure.
  """

  text: str
  paper: str
  study: str
  variant: str
  measure: str
  expected: Literal["lower", "higher"]
  than: float | None = None
  note: str = ""

  def __post_init__(self):
    split_measure(self.measure)


def load_claims(path: pathlib.Path) -> tuple[Claim, ...]:
  """Reads the CLAIMS of a Python file.

  Raises:
    ConfigError: it has none.
  """
  claims = getattr(load_module(path), "CLAIMS", None) if path.is_file() else None
  if not claims:
    raise ConfigError("--claims", f"{path} has no CLAIMS.", "Name a file such as configs/studies/claims.py.")
  return claims


def verdict(claim: Claim, row: Mapping[str, Any] | None, baseline: Mapping[str, Any] | None = None) -> str:
  """Decides by the 95 % interval alone: on the claimed side, on the other one, or on both.

  Args:
    claim: what is claimed.
    row: of its variant in the published table; None if there is none.
    baseline: row of the variant that it is compared with, whose seeds must be as many; None: of the same seeds.
  """
  figure = _figure(claim, row)
  if row is None or figure is None:
    return NOT_RUN
  # A difference is as sure as the seeds that both have.
  paired = set(row["seeds"]) if claim.than is not None or baseline is None else {*row["seeds"]} & {*baseline["seeds"]}
  if len(paired) < SEEDS or figure["low"] is None:
    return NOT_RUN
  zero = claim.than or 0.0
  above, below = figure["low"] > zero, figure["high"] < zero
  if not (above or below):
    return UNSEEN
  return YES if above == (claim.expected == "higher") else NO


def claims_page(claims: Sequence[Claim], folder: pathlib.Path) -> str:
  """Writes the page of all claims and of what the studies cost, from the published tables in `folder` alone."""
  tables = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*/{TABLE}")}
  lines = [HEAD, "| claim | in the paper | here, mean [95 % interval] | reproduced | study |", "|---|---|---|---|---|"]
  for claim in claims:
    table = tables.get(claim.study, {})
    row, baseline = _row_of(table, claim.variant), _row_of(table, table.get("baseline"))
    reference = f"[{claim.study}]({claim.study}/table.md)" if claim.study in tables else claim.study
    lines.append(
      f"| {claim.text} | {claim.paper} | {_cell(claim, row, tables)} | {verdict(claim, row, baseline)} | {reference} |"
    )

  # What explains a figure was measured, too.
  notes = dict.fromkeys(claim.note for claim in claims if claim.note)
  lines += ["", *(f"* {note}" for note in notes), *([""] if notes else []), COSTS]
  for name, table in sorted(tables.items()):
    rows, runs = table["rows"], sum(len(row["seeds"]) for row in table["rows"])
    total = lambda cost, rows=rows: sum(row["costs"][cost] * len(row["seeds"]) for row in rows)
    updates, seconds = total("updates") / runs, total("seconds")
    missing = len(table["seeds"]) * len(table["variants"]) - runs
    cells = (f"{len(rows)}", f"{runs}", f"{updates:.0f}", f"{seconds / runs:.0f}", f"{seconds / 60:.0f}", f"{missing}")
    link = f"[{name}]({name}/table.md)"
    lines.append(f"| {link} | {pathlib.PurePath(table['config']).stem} | {' | '.join(cells)} |")
  absent = sorted({claim.study for claim in claims} - set(tables))
  lines += [f"| {name} | | | 0 | | | | all |" for name in absent]
  return "\n".join(lines) + "\n"


def write_claims(claims: Sequence[Claim], folder: pathlib.Path) -> pathlib.Path:
  """Writes the page as `folder/README.md`, and returns it."""
  page = folder / "README.md"
  page.write_text(claims_page(claims, folder), encoding="utf-8")
  return page


def _row_of(table: Mapping[str, Any], variant: str | None) -> Mapping[str, Any] | None:
  return next((row for row in table.get("rows", ()) if row["variant"] == variant), None)


def _figure(claim: Claim, row: Mapping[str, Any] | None) -> Mapping[str, float | None] | None:
  """The interval that decides: of the differences from the baseline, or of the measure itself beside a number."""
  if row is None:
    return None
  return row["differences" if claim.than is None else "measures"].get(claim.measure)


def _cell(claim: Claim, row: Mapping[str, Any] | None, tables: Mapping[str, Any]) -> str:
  """Says the figure in words: of what, and against what."""
  figure = _figure(claim, row)
  if figure is None or row is None:
    return ""
  what = f"`{claim.variant}`, {claim.measure}: {shown(row['measures'][claim.measure])}"
  if claim.than is not None:
    return f"{what}; {claim.expected} than {claim.than:g}?"
  return f"{what}; less `{tables[claim.study]['baseline']}`: {shown(figure)}"
