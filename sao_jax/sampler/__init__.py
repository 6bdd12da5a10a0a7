"""Continuous-batching generation in JAX: slots, the cache, jitted prefill and decode, the scheduler, the service.

Published parameters and requests (token ids to continue, limits) enter; completions leave: token ids, each with its
log-probability and policy version. The room knows neither environments nor training.
"""
