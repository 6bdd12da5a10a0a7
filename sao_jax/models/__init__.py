"""The transformer, its mixture-of-experts layer, the value network and token log-probabilities."""
