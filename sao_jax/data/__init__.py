"""Prompt sources and the built-in byte tokenizer.

A sequence of prompts, or a data set, enters: JSON lines, parquet, what `datasets` saves, TFDS. An endless iterator
leaves: its order depends on the seed alone, its position is JSON, and every host gets its own share. This room never
imports jax itself.
"""

from __future__ import annotations

from sao_jax.data.prompts import make_prompt_iterator, split_of
from sao_jax.data.records import RecordPrompts
from sao_jax.data.tfds_source import TFDSPrompts
from sao_jax.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "RecordPrompts", "TFDSPrompts", "Tokenizer", "make_prompt_iterator", "split_of"]
