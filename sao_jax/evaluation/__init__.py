"""Episodes on fixed weights, outside the asynchronous loop: held-out success, the audit, single samples.

One policy version and prompts enter; trajectories leave, and from them success rates with confidence intervals, or the
largest difference between the log-probs of sampler and learner.
"""
