"""The routes of OpenAI's API as an ASGI application on Starlette: each request goes to the backend of its key."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from sao_jax.gateway.admission_gate import Gate
from sao_jax.gateway.connection import ClientGone, Connection
from sao_jax.gateway.exchange import (
  Answer,
  Backend,
  Backends,
  Call,
  ChatRequest,
  CompletionRequest,
  Endpoint,
  Piece,
  RequestRefused,
)
from sao_jax.gateway.reading import read_chat, read_completion
from sao_jax.gateway.request_fields import read_body, refuse, unsupported
from sao_jax.gateway.writing import Sent, Writer

if TYPE_CHECKING:
  from starlette.applications import Starlette

LARGE = 65536  # bytes of a body that is decoded in a thread


@dataclasses.dataclass(frozen=True)
class Limits:
  """Bounds of requests.

  Attributes:
    body_bytes: size of a body.
    body_seconds: time in which it must arrive.
    requests: number in flight.
  """

  body_bytes: int = 8 * 2**20
  body_seconds: float = 30.0
  requests: int = 1024


DEFAULT_LIMITS = Limits()


def make_app(
  backends: Backends,
  gate: Gate,
  limits: Limits = DEFAULT_LIMITS,
  *,
  endpoints: Sequence[Endpoint] = (),
  health: Callable[[], Mapping[str, Any]] = dict,
) -> Starlette:
  """Makes the application.

  Args:
    backends: knows the keys.
    gate: admits requests.
    limits: bounds of a request.
    endpoints: further routes.
    health: facts for `/health`, which needs no key; raises RequestRefused when the sampler is gone.
  """
  from starlette.applications import Starlette
  from starlette.routing import Route

  # The routes by method and path.
  async def check_health(connection: Connection, path: Mapping[str, str]) -> None:
    await connection.send_json({"status": "ok"} | dict(health()))

  own = {
    ("POST", "/v1/chat/completions"): functools.partial(_sample, backends, limits, True),
    ("POST", "/v1/completions"): functools.partial(_sample, backends, limits, False),
    ("GET", "/v1/models"): functools.partial(_models, backends),
    ("GET", "/v1/models/{model:path}"): functools.partial(_models, backends),
    ("GET", "/health"): check_health,
  }

  # All but the health are admitted by the gate.
  others = {(each.method, each.path): functools.partial(_call_endpoint, each, limits) for each in endpoints}
  routes = [
    Route(path, _Handler(handle, contextlib.nullcontext if path == "/health" else gate.admitted), methods=[method])
    for (method, path), handle in (own | others).items()
  ]
  handlers = {404: _no_route, 405: _no_route}
  return Starlette(routes=routes, exception_handlers=handlers)


class _Handler:
  """Serves one route: whatever goes wrong becomes an answer in OpenAI's form."""

  def __init__(
    self,
    handle: Callable[[Connection, Mapping[str, str]], Awaitable[None]],
    admitted: Callable[[], contextlib.AbstractContextManager[None]],
  ):
    self._handle, self._admitted = handle, admitted

  async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
    connection = Connection(scope, receive, send)
    try:
      with self._admitted():
        await self._handle(connection, scope.get("path_params", {}))
    except RequestRefused as refusal:
      await connection.refuse(refusal)
    except ClientGone:
      return
    except Exception:  # the client is told that it is not its fault; the log tells the rest
      logging.exception("a request to %s failed", scope.get("path"))
      await connection.refuse(RequestRefused(500, "The server failed; its log says why.", kind="server_error"))


async def _sample(
  backends: Backends, limits: Limits, chat: bool, connection: Connection, path: Mapping[str, str]
) -> None:
  """Answers a chat request, or one for completions."""
  del path
  # The key comes before the body, so that strangers send none.
  backend = backends.find(connection.key)
  body = await _read(connection, limits)
  read, delivery = read_chat(body) if chat else read_completion(body)
  requests = [dataclasses.replace(read, retried=connection.retried)] if chat else read

  # What only this backend can tell.
  _check_model(backend, requests[0].model)
  if len(requests) * delivery.choices > backend.max_choices:
    problem = f"{len(requests) * delivery.choices} answers are asked for; at most {backend.max_choices} are given."
    raise refuse("n" if delivery.choices > 1 else "prompt", problem)

  if delivery.logprobs and not backend.gives_logprobs:
    raise unsupported("logprobs")

  # Choices of one request differ by their seeds.
  asked = [
    request if request.seed is None else dataclasses.replace(request, seed=request.seed + choice)
    for request in requests
    for choice in range(delivery.choices)
  ]

  # Sampling ends when the client goes away.
  writer = Writer.of(chat, requests[0].model, delivery)
  ask = backend.chat if chat else backend.complete
  if delivery.stream:
    await connection.while_there(_stream(connection, writer, ask, asked))
  else:
    answers = await connection.while_there(_all([functools.partial(ask, request) for request in asked]))
    await connection.send_json(writer.whole(answers))


async def _all(calls: Sequence[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
  """Makes all calls at once; the first one that fails cancels the others."""
  tasks = [asyncio.ensure_future(call()) for call in calls]
  try:
    return list(await asyncio.gather(*tasks))
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(
  connection: Connection,
  writer: Writer,
  ask: Callable[[Any, Callable[[Piece], None]], Awaitable[Answer]],
  requests: Sequence[ChatRequest | CompletionRequest],
) -> None:
  """Sends chunks as pieces come; a request that is refused before its first piece gets no stream."""
  events: asyncio.Queue[tuple[int, Piece | Answer] | None] = asyncio.Queue()

  # Pieces and answers come in one queue; None comes once there is nothing more.
  async def run(index: int) -> Answer:
    answer = await ask(requests[index], lambda piece: events.put_nowait((index, piece)))
    events.put_nowait((index, answer))
    return answer

  ended = asyncio.ensure_future(_all([functools.partial(run, index) for index in range(len(requests))]))
  ended.add_done_callback(lambda _: events.put_nowait(None))

  sent = [Sent() for _ in requests]
  opened: set[int] = set()
  try:
    event = await events.get()
    while event is not None:
      # All that has come meanwhile goes in one write.
      chunks: list[dict[str, Any]] = []
      while event is not None:
        index, part = event
        chunks += [] if index in opened else writer.opening(index)
        opened.add(index)
        if isinstance(part, Answer):
          chunks += writer.closing(index, part, sent[index])
        else:
          chunks += writer.piece(index, part)
          sent[index] = sent[index].after(part)
        event = None if events.empty() else events.get_nowait()
      await connection.send_events(chunks)

      # The last answer may have come with what was just sent.
      event = None if ended.done() and events.empty() else await events.get()

    # An error of any choice is raised here, and is the last event.
    answers = await ended
    await connection.send_events(writer.totals(answers))
    await connection.end_events()
  finally:
    ended.cancel()
    await asyncio.gather(ended, return_exceptions=True)


async def _models(backends: Backends, connection: Connection, path: Mapping[str, str]) -> None:
  """Lists the models of a client, or shows one."""
  backend = backends.find(connection.key)
  if "model" in path:
    _check_model(backend, path["model"])
    await connection.send_json(_model(path["model"]))
  else:
    await connection.send_json({"object": "list", "data": [_model(name) for name in backend.models]})


def _model(name: str) -> dict[str, Any]:
  return {"id": name, "object": "model", "created": 0, "owned_by": "sao_jax"}


def _check_model(backend: Backend, name: str) -> None:
  if backend.models and name not in backend.models:
    problem = f"There is no model {name!r} here, but {', '.join(backend.models)}."
    raise RequestRefused(404, problem, param="model", code="model_not_found")


async def _call_endpoint(endpoint: Endpoint, limits: Limits, connection: Connection, path: Mapping[str, str]) -> None:
  """Answers a further route."""
  call = Call(connection.key, dict(path), await _read(connection, limits))
  await connection.send_json(await connection.while_there(_awaited(endpoint.answer(call))))


async def _awaited(answer: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
  return await answer


async def _read(connection: Connection, limits: Limits) -> dict[str, Any]:
  """Reads and decodes the body; a large one in a thread, so that others are served meanwhile."""
  body = await connection.body(limits.body_bytes, limits.body_seconds)
  return read_body(body) if len(body) < LARGE else await asyncio.to_thread(read_body, body)


async def _no_route(request: Any, error: Any) -> Any:
  """Answers requests to paths and methods that there are not."""
  from starlette.responses import JSONResponse

  path, method = request.url.path, request.method
  problem = f"There is no {path}." if error.status_code == 404 else f"{path} does not take {method}."
  refusal = RequestRefused(error.status_code, problem, code="unknown_url" if error.status_code == 404 else None)
  return JSONResponse(refusal.body(), error.status_code, headers=error.headers)
