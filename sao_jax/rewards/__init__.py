"""Verifiers of answers, the check that a reward is one finite number, and processes for graders that compute.

An answer's text and the right answer enter; one finite float leaves, or a `GraderFailure`. Nothing that a policy wrote
is ever evaluated, and a grader that takes too long is killed. This room never imports jax.
"""
