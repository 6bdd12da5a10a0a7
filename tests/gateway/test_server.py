"""The server: keys, malformed requests, clients that go away, and its end."""

from __future__ import annotations

import json
import threading
import time
import urllib.request

import hypothesis
import hypothesis.strategies as st
import openai
import pytest
from toys.gateway_toy import (
  ADD,
  KEY,
  ScriptedSampler,
  address,
  chat_body,
  client_of,
  connect,
  exchange,
  last_user,
  post,
  request_bytes,
  scripted_backend,
  serving,
  user,
)

from sao_jax.errors import ConfigError
from sao_jax.gateway.app import Limits
from sao_jax.gateway.client_keys import OneKey, make_key
from sao_jax.gateway.exchange import Endpoint, RequestRefused
from sao_jax.gateway.server import GatewayServer
from sao_jax.gateway.session_book import SessionBook

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def sampler():
  return ScriptedSampler(last_user, piece=50)


@pytest.fixture(scope="module")
def server(sampler):
  async def echo(call):
    if call.body.get("refuse"):
      raise RequestRefused(409, "No.", code="conflict")
    return {"key": call.key, "path": dict(call.path), "body": dict(call.body)}

  endpoints = [Endpoint("POST", "/things/{name}", echo)]
  limits = Limits(body_bytes=100_000, body_seconds=0.3)
  with serving(scripted_backend(sampler), endpoints=endpoints, limits=limits, grace=0.2) as server:
    yield server


def wait_until(condition, seconds=20.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it never came true"
    time.sleep(0.005)


def code_of(answer):
  status, body = answer
  assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
  return status, body["error"]["code"]


def test_nobody_comes_in_without_the_key(server):
  for key in ("", "sk-to", KEY + "x", "\xff"):
    for path in (CHAT, "/v1/completions"):
      assert code_of(post(server, path, chat_body(), key=key)) == (401, "invalid_api_key")
    assert code_of(exchange(server, request_bytes("/v1/models", b"", method="GET", key=key)))[0] == 401
  with pytest.raises(openai.AuthenticationError):
    client_of(server, key="wrong").models.list()


def test_anybody_may_ask_for_its_health(server):
  with urllib.request.urlopen(f"{server.root}/health") as response:
    assert json.load(response) == {"status": "ok"}


def test_malformed_requests_get_errors_of_openai(server):
  assert code_of(post(server, CHAT, b"{")) == (400, "invalid_json")
  assert code_of(post(server, CHAT, b"")) == (400, "missing_required_parameter")
  assert code_of(post(server, CHAT, b" " * 100_001)) == (413, "request_too_large")
  assert code_of(post(server, CHAT, chat_body(), headers="Content-Type: text/plain\r\n"))[0] == 415
  assert code_of(post(server, "/v1/nothing", {})) == (404, "unknown_url")
  assert code_of(exchange(server, request_bytes(CHAT, b"", method="GET")))[0] == 405


def test_a_body_in_chunks_is_bounded_too(server):
  head = request_bytes(CHAT, b"", headers="Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
  chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [b" " * 60_000] * 2)
  assert code_of(exchange(server, head + chunks + b"0\r\n\r\n")) == (413, "request_too_large")


def test_a_body_that_does_not_come_is_not_waited_for(server):
  slow = request_bytes(CHAT, b"").replace(b"Content-Length: 0", b"Content-Length: 10")
  assert code_of(exchange(server, slow)) == (408, "request_timeout")


def test_what_is_no_http_does_no_harm(server):
  for garbage in (
    b"\x00\x01\x02\r\n\r\n",
    b"POST\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"",
    b"POST / HTTP/1.1\r\nContent-",
  ):
    with connect(server) as connection:
      connection.sendall(garbage)
      connection.shutdown(1)
      connection.recv(100)
  assert post(server, CHAT, chat_body())[0] == 200


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
  max_leaves=6,
)
FIELDS = (
  *("model", "messages", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "stop", "n", "stream", "seed"),
  *("stream_options", "logprobs", "response_format", "prompt", "user", "return_token_ids", "logit_bias"),
)
PARTS = st.sampled_from(
  [user("a"), {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}, ADD, "toy"]
)


@hypothesis.given(
  st.dictionaries(st.sampled_from(FIELDS), JSON | PARTS | st.lists(PARTS | JSON, max_size=3), max_size=4),
  st.booleans(),
)
@hypothesis.settings(max_examples=150)
def test_no_body_breaks_the_server(server, fields, whole):
  body = (chat_body() if whole else {}) | fields
  data = json.dumps(body).encode()
  for path in (CHAT, "/v1/completions", "/things/a"):
    with connect(server) as connection:
      connection.sendall(request_bytes(path, data))
      status = int(connection.recv(65536).split()[1])
    assert status in (200, 400, 404, 409)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_the_work(server, sampler, stream):
  sampler.hold, ended = True, sampler.ended
  try:
    with connect(server) as connection:
      connection.sendall(request_bytes(CHAT, json.dumps(chat_body(stream=stream)).encode()))
      wait_until(lambda: sampler.active == 1)
    wait_until(lambda: sampler.active == 0)
  finally:
    sampler.hold = False
  assert sampler.ended == ended + 1


def test_one_choice_that_fails_takes_the_others_along(server, sampler):
  def script(prompt):
    raise RuntimeError("a fault of the sampler")

  sampler.script = script
  try:
    assert code_of(post(server, CHAT, chat_body(n=3)))[0] == 500
    assert code_of(post(server, CHAT, chat_body(stream=True)))[0] == 500
  finally:
    sampler.script = last_user
  assert sampler.active == 0 and post(server, CHAT, chat_body())[0] == 200


def test_further_routes_take_and_give_json(server):
  status, answer = post(server, "/things/a", {"x": 1})
  assert status == 200 and answer == {"key": KEY, "path": {"name": "a"}, "body": {"x": 1}}
  assert post(server, "/things/a", b"")[1]["body"] == {}
  assert code_of(post(server, "/things/a", {"refuse": True})) == (409, "conflict")


def test_there_are_not_too_many_requests_at_a_time():
  sampler = ScriptedSampler(last_user)
  sampler.hold = True
  with serving(scripted_backend(sampler), limits=Limits(requests=2)) as server:
    waiting = [threading.Thread(target=post, args=(server, CHAT, chat_body())) for _ in range(2)]
    for thread in waiting:
      thread.start()
    wait_until(lambda: sampler.active == 2)
    with pytest.raises(openai.RateLimitError), client_of(server) as client:
      client.chat.completions.create(**chat_body())
    assert urllib.request.urlopen(f"{server.root}/health").status == 200
    sampler.hold = False
    for thread in waiting:
      thread.join()
    assert post(server, CHAT, chat_body())[0] == 200


def test_sessions_that_are_open_have_room_of_their_own():
  book, answers = SessionBook("admin"), []
  sessions = [book.open({}, environment="agent", model="toy") for _ in range(2)]
  with GatewayServer(book, limits=Limits(requests=0), further_requests=book.room) as server:
    ask = lambda session: answers.append(post(server, CHAT, chat_body(), key=session.key))
    waiting = [threading.Thread(target=ask, args=(session,)) for session in sessions * 4]
    for thread in waiting:
      thread.start()
    wait_until(lambda: len(server._gate._tasks) == 8)
    ask(sessions[0])
    assert code_of(answers.pop()) == (429, "rate_limit_exceeded")
    for session in sessions:
      book.close(session, "it is over")
    for thread in waiting:
      thread.join()
  assert {code_of(answer) for answer in answers} == {(401, "session_closed")} and book.room() == 0


def test_a_server_that_stops_gives_requests_their_time_and_then_ends_them():
  sampler, answers = ScriptedSampler(last_user), []
  sampler.hold = True
  ask = lambda server, **fields: answers.append(post(server, CHAT, chat_body(**fields)))
  with serving(scripted_backend(sampler), grace=0.1) as server:
    thread = threading.Thread(target=ask, args=(server,))
    thread.start()
    wait_until(lambda: sampler.active == 1)
  thread.join()
  assert code_of(answers[0]) == (503, "server_stopped") and sampler.active == 0
  with pytest.raises(OSError):
    connect(server)
  server.stop()  # a second time


def test_an_address_is_refused_before_anything_runs():
  backend = scripted_backend(ScriptedSampler(last_user))
  with serving(backend) as server, pytest.raises(ConfigError, match="cannot listen"):
    GatewayServer(OneKey(backend), port=address(server)[1])
  with pytest.raises(ConfigError, match="Set a key"):
    GatewayServer(OneKey(backend), host="0.0.0.0")
  GatewayServer(OneKey(backend, make_key()), host="0.0.0.0").stop()
