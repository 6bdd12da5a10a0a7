"""Requests and answers in the terms of OpenAI's API, and the protocols behind them.

The HTTP side reads and checks requests, and finds the `Backend` of a key; a backend answers them one by one. All
backends of a server are called in its own event loop. A client that goes away cancels the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

INVALID, UNAUTHORIZED, UNAVAILABLE = "invalid_request_error", "authentication_error", "service_unavailable_error"


class RequestRefused(Exception):
  """The end of a request as OpenAI's API tells it.

  >>> RequestRefused(404, "there is no model 'x'.", param="model", code="model_not_found").body()["error"]["param"]
  'model'
  """

  def __init__(
    self, status: int, message: str, *, kind: str = INVALID, param: str | None = None, code: str | None = None
  ):
    """Names the refusal.

    Args:
      status: of the HTTP response, 4xx or 5xx.
      message: the problem in full sentences.
      kind: OpenAI's `type` of error.
      param: the field of the request that is at fault.
      code: a word for programs, such as "context_length_exceeded".
    """
    super().__init__(message)
    self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

  def body(self) -> dict[str, Any]:
    """The JSON of the response."""
    return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

  def anew(self) -> RequestRefused:
    """An equal one, to be raised: an exception that is raised again and again holds on to the frames of all times."""
    return RequestRefused(self.status, self.message, kind=self.kind, param=self.param, code=self.code)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRequest:
  """Rules for sampling one answer, checked already: a backend refuses only what it cannot do itself.

  Attributes:
    model: the name that the client has sent.
    max_tokens: at least 1; None for as many as the context has left.
    temperature: None where the client leaves it to the server.
    top_p: None likewise.
    stop: texts that end the answer and are not part of it; at most four, none of them empty.
    seed: of the random numbers; None for others in every request.
    token_facts: True where the client reads ids, log-probabilities or versions of the tokens.
  """

  model: str = ""
  max_tokens: int | None = None
  temperature: float | None = None
  top_p: float | None = None
  stop: tuple[str, ...] = ()
  seed: int | None = None
  token_facts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest(SamplingRequest):
  """A conversation to go on with.

  Attributes:
    messages: OpenAI's messages with text contents: parts of text are joined, "developer" is called "system",
      `arguments` of an assistant's tool calls are objects, as chat templates read them.
    tools: OpenAI's tools, None without any; with `tool_choice` "none" they are left out.
    must_call: `tool_choice` forces a call. A backend that cannot force one refuses it, or leaves it to the policy.
    retried: the client says that it has sent the same before, and got no answer.
  """

  messages: tuple[Mapping[str, Any], ...]
  tools: tuple[Mapping[str, Any], ...] | None = None
  must_call: bool = False
  retried: bool = dataclasses.field(default=False, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest(SamplingRequest):
  """A text or token ids to go on with."""

  prompt: str | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AnsweredCall:
  """A tool call in an answer; `arguments` is JSON in a string, as OpenAI's API has it."""

  id: str
  name: str
  arguments: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """Sampled text and its account.

  Attributes:
    content: the text, without thinking, calls and the stop token; None where a message has only calls.
    finish_reason: "stop", "length", or "tool_calls".
    reasoning_content: the thinking; None without any.
    tool_calls: in the order in which they were said.
    prompt_tokens: how many tokens were read.
    completion_tokens: how many were sampled, the stop token included.
    prompt_token_ids, token_ids: those tokens.
    token_texts: each sampled token as text, for log-probabilities.
    logprobs, policy_versions: of each sampled token; all may be empty unless `token_facts` was asked.
  """

  content: str | None
  finish_reason: str
  reasoning_content: str | None = None
  tool_calls: tuple[AnsweredCall, ...] = ()
  prompt_tokens: int = 0
  completion_tokens: int = 0
  prompt_token_ids: Sequence[int] = ()
  token_ids: Sequence[int] = ()
  token_texts: Sequence[str] = ()
  logprobs: Sequence[float] = ()
  policy_versions: Sequence[int] = ()


ChatAnswer = CompletionAnswer = Answer


@dataclasses.dataclass(frozen=True)
class Piece:
  """A further part of an answer that is still being sampled: text of the content, or of the thinking."""

  content: str = ""
  reasoning_content: str = ""


Emit = Callable[[Piece], None]


class Backend(Protocol):
  """One client's view of the policy.

  Attributes:
    models: the names that requests may give; any name where there are none. The first one is that of the policy.
    max_choices: the largest `n`; each choice is a call of its own, all at the same time.
    gives_logprobs: False where answers have no log-probabilities, so that requests for them are refused.
  """

  models: tuple[str, ...]
  max_choices: int
  gives_logprobs: bool

  async def chat(self, request: ChatRequest, emit: Emit | None = None) -> Answer:
    """Answers a conversation.

    Args:
      request: the conversation.
      emit: called in the event loop with what is known of the answer so far, where the client streams. What was not
        emitted is sent from the answer itself, so a backend may leave it out; what was emitted is its beginning.

    Raises:
      RequestRefused: the request cannot be served.
      asyncio.CancelledError: the client went away; whatever the call holds is freed.
    """
    ...

  async def complete(self, request: CompletionRequest, emit: Emit | None = None) -> Answer:
    """Goes on with a text; arguments and errors as for `chat`."""
    ...


class Backends(Protocol):
  """Knows the clients."""

  def find(self, key: str) -> Backend:
    """Returns the backend of a key, "" where a request has none.

    Raises:
      RequestRefused: nobody has that key (`unknown_key`).
    """
    ...


@dataclasses.dataclass(frozen=True)
class Call:
  """A request to an `Endpoint`: the key, the parts of the path that have names, and the body, {} where it is empty."""

  key: str
  path: Mapping[str, str]
  body: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A further route of a server, which takes and gives JSON.

  Attributes:
    method: "GET", "POST" or "DELETE".
    path: as Starlette writes them, for example "/sessions/{session_id}/reward".
    answer: raises `RequestRefused`; is cancelled when the client goes away. It checks the key itself.
  """

  method: str
  path: str
  answer: Callable[[Call], Awaitable[Mapping[str, Any]]]


def unknown_key(key: str) -> RequestRefused:
  """The refusal of a request with a wrong key, or with none."""
  problem = "The API key is not known here." if key else "There is no API key: send `Authorization: Bearer KEY`."
  return RequestRefused(401, problem, kind=UNAUTHORIZED, code="invalid_api_key")


def context_exceeded(prompt_tokens: int, context_length: int) -> RequestRefused:
  """The refusal of a prompt that leaves no room for an answer."""
  # Libraries look for these words of OpenAI's.
  problem = f"This model's maximum context length is {context_length} tokens; the prompt has {prompt_tokens} of them."
  return RequestRefused(400, problem, param="messages", code="context_length_exceeded")
