"""The pieces of a run, put together from its configuration: devices, mesh, networks, optimisers, compiled steps.

A `RunConfig` enters; a learner, a sampler service and a publisher leave. For every step, trajectories enter and packed
rows [B, T] of a few fixed shapes, sharded over the mesh, leave.
"""
