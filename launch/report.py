"""Draws the curves of a run, and one HTML page with the curves and three episodes.

python -m launch.report --workdir=runs/calculator
"""

from __future__ import annotations

from absl import logging

from launch import _flags
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import expand
from sao_jax.parallel.agreement import all_processes
from sao_jax.report.page import write_report


def main(config: RunConfig, workdir: str) -> None:
  """Writes `workdir/report/`."""
  del config
  if all_processes().is_writer:
    page, *_ = write_report(workdir)
    logging.info("The report is %s", expand(page))


if __name__ == "__main__":
  _flags.run(main, writes=False, configured=False)
