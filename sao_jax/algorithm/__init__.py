"""The mathematics of SAO (arXiv 2607.07508): advantages, losses, diagnostics and the train step that joins them.

A train state and a packed batch [B, T] enter, with the two networks as plain functions; the next state and a dict of
metrics leave. The room knows no model, no mesh and no sampler. Begin with `train_step`.
"""
