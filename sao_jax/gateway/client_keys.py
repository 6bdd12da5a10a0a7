"""Keys by which a server knows its clients."""

from __future__ import annotations

import dataclasses
import hmac
import secrets

from sao_jax.gateway.exchange import Backend, unknown_key


def make_key() -> str:
  """Returns a key that nobody can guess."""
  return f"sk-{secrets.token_urlsafe(32)}"


def same_key(given: str, key: str) -> bool:
  """Compares keys in a time that tells nothing of how far they agree."""
  return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode("utf-8", "surrogateescape"))


@dataclasses.dataclass(frozen=True)
class OneKey:
  """One backend for everybody who has the key; for everybody, where the key is ""."""

  backend: Backend
  key: str = ""

  def find(self, key: str) -> Backend:
    """Returns the backend. Raises RequestRefused for another key."""
    if self.key and not same_key(key, self.key):
      raise unknown_key(key)
    return self.backend
