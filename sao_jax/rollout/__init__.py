"""The asynchronous host loop: admission, episodes, evidence checks, staleness, the trajectory buffer.

Prompts, an environment and a sampler enter; finished trajectories leave in the order in which they finished, a batch at
a time. Every rollout has one place or one outcome, and the counts of both add up at every step.
"""
