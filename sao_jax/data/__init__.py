"""Data: the built-in byte tokenizer, and prompt sources whose order depends on the seed alone and can be resumed.

A source is a sequence of prompts (an environment's, or a TFDS data set); an iterator deals it out to the hosts, epoch
by epoch. This room never imports jax itself.
"""
