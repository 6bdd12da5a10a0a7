"""Episodes on fixed weights, outside the asynchronous loop: held-out success, benchmarks, the audit, single samples.

One policy version and prompts enter; trajectories leave, and from them success rates with confidence intervals, the
numbers of a published benchmark, or the largest difference between the log-probs of sampler and learner.
"""

from __future__ import annotations

from sao_jax.evaluation.audit import audit_sampler
from sao_jax.evaluation.fixed_policy import run_episodes
from sao_jax.evaluation.heldout import Evaluation, evaluate
from sao_jax.evaluation.suite import find_suite

__all__ = ["Evaluation", "audit_sampler", "evaluate", "find_suite", "run_episodes"]
