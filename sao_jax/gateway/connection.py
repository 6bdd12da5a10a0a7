"""One HTTP request and its response: the body within limits, a client that goes away, a refusal at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from sao_jax.gateway.exchange import RequestRefused

T = TypeVar("T")
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


class ClientGone(Exception):
  """The client has closed its connection: nobody reads the answer."""


class Connection:
  """Receives one request and sends its response, by the rules of ASGI.

  Attributes:
    begun: True once a part of the response was sent.
  """

  def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send):
    """Takes what a server hands to an application."""
    self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    self._receive, self._send = receive, send
    self.begun, self._streams = False, False

  @property
  def key(self) -> str:
    """The key of `Authorization: Bearer KEY`, "" without one."""
    scheme, _, key = self.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""

  @property
  def retried(self) -> bool:
    """True when the client says, as OpenAI's do, that it has sent this request before."""
    count = self.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0

  async def body(self, most_bytes: int, seconds: float) -> bytes:
    """Reads the body.

    Raises:
      RequestRefused: it is longer than `most_bytes`, takes longer than `seconds`, or is not called JSON.
      ClientGone: the client went away in its middle.
    """
    too_large = RequestRefused(413, f"The body has more than {most_bytes} bytes.", code="request_too_large")
    length = self.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most_bytes:
      raise too_large

    # A client may leave the length out, or lie: what comes is counted.
    try:
      async with asyncio.timeout(seconds):
        chunks, read = [], 0
        while True:
          message = await self._receive()
          if message["type"] == "http.disconnect":
            raise ClientGone
          chunks.append(message.get("body", b""))
          read += len(chunks[-1])
          if read > most_bytes:
            raise too_large
          if not message.get("more_body", False):
            break
    except TimeoutError as error:
      raise RequestRefused(408, f"The body took longer than {seconds:g} seconds.", code="request_timeout") from error

    # A page in a browser may send other types to this machine without asking, but not this one.
    kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
    if read and kind != JSON:
      raise RequestRefused(415, f"The body must be sent as Content-Type: {JSON}.", code="unsupported_media_type")
    return b"".join(chunks)

  async def while_there(self, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end, once the body was read; cancels it when the client goes away.

    Raises:
      ClientGone: it has.
      BaseException: whatever `work` raises.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
    try:
      await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
      if not task.done():
        raise ClientGone
      return task.result()
    finally:
      task.cancel()
      watch.cancel()
      await asyncio.gather(task, watch, return_exceptions=True)  # what it holds is free now

  async def _gone(self) -> None:
    while (await self._receive())["type"] != "http.disconnect":
      pass

  async def send_json(self, value: Mapping[str, Any], status: int = 200, **headers: str) -> None:
    """Sends a whole response."""
    body = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    await self._start(status, {"content-type": JSON, "content-length": str(len(body))} | headers)
    await self._send({"type": "http.response.body", "body": body})

  async def send_events(self, values: list[Mapping[str, Any]]) -> None:
    """Sends further events of a stream; the first ones begin the response."""
    if not values:
      return
    if not self.begun:
      await self._start(200, {"content-type": EVENTS, "cache-control": "no-cache", "x-accel-buffering": "no"})
      self._streams = True
    lines = [json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for value in values]
    body = "".join(f"data: {line}\n\n" for line in lines).encode("utf-8")
    await self._send({"type": "http.response.body", "body": body, "more_body": True})

  async def end_events(self) -> None:
    """Ends a stream."""
    await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

  async def refuse(self, refusal: RequestRefused) -> None:
    """Sends a refusal: as the response, or, in the middle of a stream, as its last event."""
    if not self.begun:
      retry = {"retry-after": "1"} if refusal.status in (429, 503) else {}
      await self.send_json(refusal.body(), refusal.status, **retry)
    elif self._streams:
      await self.send_events([refusal.body()])
      await self._send({"type": "http.response.body", "body": b""})

  async def _start(self, status: int, headers: Mapping[str, str]) -> None:
    self.begun = True
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await self._send({"type": "http.response.start", "status": status, "headers": encoded})
