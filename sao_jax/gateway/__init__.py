"""The policy behind OpenAI's API: requests are read and checked, answered by a backend, and written as HTTP.

Requests of clients enter, chats and completions; answers leave, whole or as they are sampled. A server runs in a thread
with an event loop of its own. This room never imports jax itself.
"""

from __future__ import annotations

from sao_jax.gateway.exchange import Answer, Backend, Backends, ChatRequest, CompletionRequest, Endpoint, RequestRefused

__all__ = ["Answer", "Backend", "Backends", "ChatRequest", "CompletionRequest", "Endpoint", "RequestRefused"]
