"""Checkpoints of a run, written through Orbax: asynchronous, atomic, never pickled.

A train state on the mesh and the host's state (counters, prompt order, buffered trajectories) enter at a step boundary;
both leave again on resume, placed on the mesh of the new run, or single networks for evaluation and export.
"""
