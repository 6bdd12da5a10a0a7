"""Runs a study, variants times seeds, and reports what it shows; run again, it goes on where it was.

python -m launch.study --suite=configs/studies/methods.py --output=runs/methods --jobs=2
"""

from __future__ import annotations

import pathlib

from absl import flags, logging

from launch import _flags
from sao_jax import interrupt
from sao_jax.errors import ConfigError, RunError
from sao_jax.study import load_study, run_study, write_study_report

_SUITE = flags.DEFINE_string("suite", None, "Python file whose get_study() returns a Study.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder of the study's runs and its report.", required=True)
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at the same time.", lower_bound=1)
_ONLY = flags.DEFINE_list("only", [], "Variants to run; all by default.")


def main() -> None:
  """Runs what is not done, and writes `output/report/`; one run that fails does not stop the others."""
  study, output = load_study(_SUITE.value), pathlib.Path(_OUTPUT.value).expanduser()
  unknown = [name for name in _ONLY.value if name not in study.variants]
  if unknown:
    raise ConfigError("--only", f"there is no {unknown[0]!r}.", f"Choose from {', '.join(study.variants)}.")

  with interrupt.Interrupt() as stop:
    results = run_study(study, output, jobs=_JOBS.value, only=_ONLY.value, interrupt=stop)
  failed = {run: problem for run, problem in results.items() if problem != "done"}
  for run, problem in failed.items():
    logging.error("%s: %s", run, problem)
  if len(failed) < len(results):
    logging.info("The report is %s", write_study_report(study, output))
  if failed:
    raise RunError(f"{len(failed)} of {len(results)} runs are not done; the same command tries them again.")


if __name__ == "__main__":
  _flags.run_tool(main, example="--output=runs/methods")
