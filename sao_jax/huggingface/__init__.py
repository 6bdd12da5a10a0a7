"""Hugging Face folders in and out: families of published models, streamed loading, export.

A folder with config.json and safetensors enters; a `ModelConfig` and parameters on the mesh leave. On the way back, a
folder leaves that transformers, vLLM and SGLang load. A field or tensor that is not understood is refused by name.
"""
