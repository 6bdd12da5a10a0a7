"""Programs of a run, compiled for real TPU topologies without a TPU, and what they need of each chip.

A `RunConfig` and the name of a topology enter. Memory against the chip's HBM, the largest arrays, FLOPs, communication
by mesh axis and a roofline leave. Everything is computed from the optimised program, nothing is measured.
"""

from __future__ import annotations

from sao_jax.pod.communication import collectives
from sao_jax.pod.hlo import Program, parse
from sao_jax.pod.matrix_products import products
from sao_jax.pod.traffic import arrays_quadratic_in, largest_arrays

__all__ = ["Program", "arrays_quadratic_in", "collectives", "largest_arrays", "parse", "products"]
