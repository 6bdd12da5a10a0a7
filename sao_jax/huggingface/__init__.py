"""Hugging Face folders in and out: families of published models, streamed loading, export.

A folder with config.json and safetensors enters; a `ModelConfig` and parameters on the mesh leave. On the way back, a
folder leaves that transformers, vLLM and SGLang load. A field or tensor that is not understood is refused by name.
"""

from __future__ import annotations

from sao_jax.huggingface.convert import to_checkpoint, to_hf
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.published import PUBLISHED
from sao_jax.huggingface.save import export_policy

__all__ = ["HFFolder", "PUBLISHED", "export_policy", "import_policy", "to_checkpoint", "to_hf"]
