"""Draws the curves of a run, and one HTML page with the curves and three episodes; or several runs over one another.

python -m launch.report --workdir=runs/calculator
python -m launch.report runs/sao runs/grpo --output=runs/compared [--axis=tokens] [--metrics=heldout_success,entropy]
python -m launch.report --study=configs/studies/methods.py --output=runs/methods [--publish=notebooks/results]
python -m launch.report --claims=configs/studies/claims.py --publish=notebooks/results
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags, logging

from launch import _flags
from launch._processes import flag_value
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import expand
from sao_jax.errors import ConfigError
from sao_jax.parallel.agreement import all_processes
from sao_jax.report.metrics import METRICS_FILE
from sao_jax.report.page import write_report
from sao_jax.study import load_study, write_overlay, write_study_report
from sao_jax.study.claims import load_claims, write_claims
from sao_jax.study.overlay import METRICS
from sao_jax.study.series import LABELS

_OUTPUT = flags.DEFINE_string("output", None, "Folder of pictures of several runs, or of a study.")
_STUDY = flags.DEFINE_string("study", None, "A study's Python file: its report is written anew.")
_PUBLISH = flags.DEFINE_string("publish", None, "Folder of published studies; the report goes into one of its name.")
_CLAIMS = flags.DEFINE_string("claims", None, "Python file with CLAIMS: their page is written anew into --publish.")
_AXIS = flags.DEFINE_enum("axis", "steps", list(LABELS), "Horizontal axis of several runs.")
_METRICS = flags.DEFINE_list("metrics", list(METRICS), "Metrics of several runs, one picture each.")


def main(config: RunConfig, workdir: str) -> None:
  """Writes `workdir/report/`."""
  del config
  if all_processes().is_writer:
    page, *_ = write_report(workdir)
    logging.info("The report is %s", expand(page))


def several(runs: list[str]) -> None:
  """Writes the pictures of several runs, the report of a study, or the page of the claims."""
  if _CLAIMS.value:
    folder = pathlib.Path(expand(_needed("publish", _PUBLISH.value, "notebooks/results")))
    logging.info("The page is %s", write_claims(load_claims(pathlib.Path(_CLAIMS.value)), folder))
    return
  if not runs and not _STUDY.value:
    raise ConfigError("--workdir", "it is missing.", "Name a run, as in --workdir=runs/a; or several, without a flag.")
  output = pathlib.Path(expand(_needed("output", _OUTPUT.value, "runs/compared")))
  if _STUDY.value:
    study = load_study(_STUDY.value)
    folder = pathlib.Path(expand(_PUBLISH.value)) / study.name if _PUBLISH.value else None
    logging.info("The report is %s", write_study_report(study, output, folder, axis=_AXIS.value))
    return

  # A folder names its run.
  paths = [pathlib.Path(expand(run)) for run in runs]
  for path in paths:
    if not (path / METRICS_FILE).is_file():
      raise ConfigError("command line", f"{path} has no {METRICS_FILE}.", "Name folders of runs that have trained.")
  names = [path.name for path in paths]
  groups = {path.name if names.count(path.name) == 1 else str(path): [path] for path in paths}
  for picture in write_overlay(groups, output, metrics=_METRICS.value, axis=_AXIS.value):
    logging.info("%s", picture)


def _needed(name: str, value: str | None, example: str) -> str:
  if not value:
    raise ConfigError(f"--{name}", "it is missing.", f"Name a folder, as in --{name}={example}.")
  return value


if __name__ == "__main__":
  if flag_value(sys.argv, "workdir") is None and len(sys.argv) > 1:
    _flags.run_tool(several, example="--workdir=runs/calculator", takes_arguments=True)
  _flags.run(main, writes=False, configured=False)
