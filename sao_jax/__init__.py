"""SAO: Single-Rollout Asynchronous Optimization (arXiv 2607.07508) in pure JAX."""

__version__ = "0.1.0"
