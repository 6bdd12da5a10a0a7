"""Rollout: the asynchronous host loop from prompts to packed batches (admission, episodes, staleness, packing)."""
