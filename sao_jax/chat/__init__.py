"""Conversations as token ids, for models that speak through a Hugging Face tokenizer and chat template.

Messages and the ids that a policy sampled enter; the ids to append next leave, and the tool calls found in what was
said. Sampled ids are never tokenised again: a template that rewrites history begins a new segment of the trajectory.
This room never imports jax itself.
"""

from __future__ import annotations

from sao_jax.chat.conversation import ChatRenderer, ChatSession
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.chat.tool_calls import ParseError, ToolCall, parse_glm, parse_hermes

__all__ = ["ChatRenderer", "ChatSession", "HFTokenizer", "ParseError", "ToolCall", "parse_glm", "parse_hermes"]
