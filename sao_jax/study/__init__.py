"""Studies: variants of a run times seeds, run as ordinary runs, and what they show together.

A study names its runs; `run_study` starts the launchers for those that are not done; tables and pictures read the
folders that they leave. Nothing of a run is computed here.
"""

from __future__ import annotations

from sao_jax.study.bootstrap import mean_interval
from sao_jax.study.overlay import draw_curves, write_overlay
from sao_jax.study.plan import Study, load_study
from sao_jax.study.results import load_results
from sao_jax.study.study_report import write_study_report
from sao_jax.study.study_runs import run_study

__all__ = ["Study", "draw_curves", "load_results", "load_study"]
__all__ += ["mean_interval", "run_study", "write_overlay", "write_study_report"]
