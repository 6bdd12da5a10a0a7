"""The readable loop and its phases: imitation, value pretraining, asynchronous SAO, replay.

A checked `RunConfig` and a working directory enter; checkpoints, metrics and a trained policy leave. Begin with `loop`.
"""
