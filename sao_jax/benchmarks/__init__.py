"""Measurements of this code on the machine at hand, for `launch.benchmark`.

A scale (full, or tiny for tests) enters; ratios taken in one run leave, as dicts for JSON and as tables. Every figure
is compared with a limit or a peer measured next to it, because the speed of a machine drifts.
"""

from __future__ import annotations

from sao_jax.benchmarks.scale import FULL, QUICK, Scale
from sao_jax.benchmarks.suites import machine, tables

__all__ = ["FULL", "QUICK", "Scale", "machine", "tables"]
