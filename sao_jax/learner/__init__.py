"""The pieces of a run, put together from its configuration: devices, mesh, networks, optimisers, compiled steps.

A `RunConfig` enters; a learner, a sampler service and a publisher leave. For every step, trajectories enter and packed
rows [B, T] of a few fixed shapes, sharded over the mesh, leave.
"""

from __future__ import annotations

from sao_jax.learner.batches import packed_batch
from sao_jax.learner.sampler_side import make_publisher, make_service
from sao_jax.learner.setup import Learner, make_learner, make_state, make_step

__all__ = ["Learner", "make_learner", "make_publisher", "make_service", "make_state", "make_step", "packed_batch"]
