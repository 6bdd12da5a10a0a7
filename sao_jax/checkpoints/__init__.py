"""Checkpoints of a run, written through Orbax: asynchronous, atomic, never pickled.

A train state on the mesh and the host's state (counters, prompt order, buffered trajectories) enter at a step boundary;
both leave again on resume, placed on the mesh of the new run, or single networks for evaluation and export.
"""

from __future__ import annotations

from sao_jax.checkpoints.checkpointer import Checkpointer, load_host_state, load_params

__all__ = ["Checkpointer", "load_host_state", "load_params"]
