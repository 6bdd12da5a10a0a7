"""Devices: the mesh, declared parameters, the one table from logical to mesh axes, publishing, process start-up.

Declarations of parameters (shape, logical axes, initialiser) enter; initial values, abstract trees and shardings leave.
After every step, a copy of the training parameters leaves for the sampler's devices.
"""

from __future__ import annotations

from sao_jax.parallel.layout import AxisRules, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.parallel.params import ParamSpec, init_params
from sao_jax.parallel.process import initialize_processes
from sao_jax.parallel.publish import make_publish

__all__ = ["AxisRules", "Layout", "ParamSpec", "init_params", "initialize_processes", "make_mesh", "make_publish"]
