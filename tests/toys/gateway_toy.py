"""Gateways in tests: a sampler that says what it is told to, servers around it, and HTTP by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator

import openai

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.gateway.client_keys import OneKey
from sao_jax.gateway.sampler_backend import Sampled, SamplerBackend
from sao_jax.gateway.server import GatewayServer

KEY = "sk-toy"
BYTES = ByteTokenizer()
ADD = {
  "type": "function",
  "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class ScriptedSampler:
  """Says a text that it makes of the prompt's text, a few tokens at a time. An event may hold it up.

  Attributes:
    active: number of turns that run; `ended` counts those that were cancelled or stopped.
    asked: the keyword arguments of each turn.
  """

  def __init__(self, script: Callable[[str], str], *, piece: int = 3, tokenizer=BYTES, end: str = "<|end|>"):
    self.script, self.piece, self.tokenizer, self.end = script, piece, tokenizer, end
    self.context_length, self.vocab_size, self.top_p = 4096, tokenizer.vocab_size, 1.0
    self.active = self.ended = 0
    self.asked: list[dict] = []
    self.hold = False

  async def sample(self, prompt_ids, *, max_tokens, stop_ids, on_tokens=None, **asked) -> Sampled:
    self.asked.append(asked | {"max_tokens": max_tokens, "stop_ids": stop_ids})
    text = self.script(self.tokenizer.decode(prompt_ids)) + self.end
    said = self.tokenizer.encode_with_specials(text).tolist()
    reason = "stop" if len(said) <= max_tokens else "length"
    said, sent = said[:max_tokens], []
    self.active += 1
    try:
      while len(sent) < len(said):
        while self.hold:
          await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        part = said[len(sent) : len(sent) + self.piece]
        sent += part
        if on_tokens is not None and not on_tokens(part):
          self.ended += 1
          reason = "stop"
          break
    except asyncio.CancelledError:
      self.ended += 1
      raise
    finally:
      self.active -= 1
    return Sampled(sent, [-0.5] * len(sent), [7] * len(sent), reason)


def last_user(prompt: str) -> str:
  """The last message of a user in a rendering, said again: a script."""
  return prompt.rpartition("<|user|>")[2].partition("<|end|>")[0]


def scripted_backend(sampler: ScriptedSampler, **settings) -> SamplerBackend:
  return SamplerBackend(sampler, BYTES, model="toy", renderer=ChatRenderer(BYTES), stop_ids=(BYTES.end_id,), **settings)


@contextlib.contextmanager
def serving(backend, key: str = KEY, **settings) -> Iterator[GatewayServer]:
  """A server for one key."""
  with GatewayServer(OneKey(backend, key), **settings) as server:
    yield server


def client_of(server: GatewayServer, key: str = KEY, **settings) -> openai.OpenAI:
  return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0, **settings)


def user(text: str) -> dict[str, str]:
  return {"role": "user", "content": text}


def address(server: GatewayServer) -> tuple[str, int]:
  host, _, port = server.root.removeprefix("http://").rpartition(":")
  return host, int(port)


def connect(server: GatewayServer) -> socket.socket:
  return socket.create_connection(address(server), timeout=20)


def request_bytes(path: str, body: bytes, *, method: str = "POST", key: str = KEY, headers: str = "") -> bytes:
  kind = "" if "content-type" in headers.lower() else "Content-Type: application/json\r\n"
  head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {key}\r\n{kind}{headers}"
  return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def exchange(server: GatewayServer, sent: bytes) -> tuple[int, dict]:
  """Sends bytes over a connection of their own; returns the status and the JSON of the response."""
  with connect(server) as connection:
    connection.sendall(sent)
    received = b""
    while chunk := connection.recv(65536):
      received += chunk
  head, _, body = received.partition(b"\r\n\r\n")
  return int(head.split()[1]), json.loads(body)


def post(server: GatewayServer, path: str, value: object, **settings) -> tuple[int, dict]:
  """Posts JSON, or bytes as they are."""
  body = value if isinstance(value, bytes) else json.dumps(value).encode()
  return exchange(server, request_bytes(path, body, **settings))


def chat_body(**fields) -> dict:
  return {"model": "toy", "messages": [user("hello")]} | fields
