"""Continuous-batching generation: KV cache and engine state as pytrees, jitted prefill and decode, a slot scheduler."""
