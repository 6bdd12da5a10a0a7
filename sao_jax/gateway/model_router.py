"""Sessions told apart by the model that a request names, for programs that have one address and one key for all."""

from __future__ import annotations

import dataclasses

from sao_jax.gateway.exchange import Answer, Backend, ChatRequest, CompletionRequest, Emit
from sao_jax.gateway.session_book import SessionBook


class ModelRouter:
  """The `Backends` of a server, and its only backend: the name of the model is the key of a session.

  Nobody can guess such a name, so it lets in whom a key would let in.
  """

  models: tuple[str, ...] = ()
  max_choices, gives_logprobs = 1, False

  def __init__(self, book: SessionBook):
    """Takes the sessions."""
    self._book = book

  def find(self, key: str) -> Backend:
    """Returns itself: the request tells the session."""
    return self

  async def chat(self, request: ChatRequest, emit: Emit | None = None) -> Answer:
    """Hands a request to its session, see `Backend.chat`; a model that is none is refused as an unknown key."""
    session = self._book.find(request.model)
    return await session.chat(dataclasses.replace(request, model=session.models[0]), emit)

  async def complete(self, request: CompletionRequest, emit: Emit | None = None) -> Answer:
    """Hands a request to its session, which refuses it."""
    return await self._book.find(request.model).complete(request, emit)
