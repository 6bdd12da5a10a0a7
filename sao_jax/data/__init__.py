"""Prompt sources and the built-in byte tokenizer.

A sequence of prompts, or a TFDS data set, enters. An endless iterator leaves: its order depends on the seed alone, its
position is JSON, and every host gets its own share. This room never imports jax itself.
"""
