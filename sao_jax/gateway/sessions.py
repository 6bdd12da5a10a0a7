"""Sessions: an agent's requests on one side, the episode that answers them on the other, one session for each episode.

The HTTP side lives in the server's event loop, the episode in that of the rollouts, and a harness may be in a thread
besides: a `Session` may be used from all of them. Requests are answered one after the other, in the order in which they
came. One whose client has gone away before anybody took it up is forgotten. Once taken up it is sampled to its end, and
its answer is kept: a client that comes back with the very same request, as OpenAI's does after a lost connection, gets
that answer, and nothing is sampled twice. If the answer was written already, nobody here can tell if it has arrived:
OpenAI's clients say that they try again, and get it again; the same request of others is a new one, and counted.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sao_jax.gateway.exchange import UNAUTHORIZED, Answer, ChatRequest, CompletionRequest, Emit, RequestRefused

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class AgentTask:
  """One episode, as the agent that plays it is told.

  Attributes:
    id: the session's.
    base_url: of OpenAI's API, ends with /v1.
    key: the API key.
    reward_url: where `{"reward": 1.0}` is posted to end the episode, unless the harness returns its reward.
    reward_key: the key for that.
    model: the policy's name.
    data: the task, JSON values.
  """

  id: str
  base_url: str
  key: str
  reward_url: str
  reward_key: str
  model: str
  data: Mapping[str, Any]


@dataclasses.dataclass(eq=False)
class Pending:
  """One request, from its arrival to its answer.

  Attributes:
    request: what the agent has sent.
    readers: clients that wait for the answer.
    read: a client has got it.
  """

  request: ChatRequest
  readers: int = 1
  read: bool = False
  future: concurrent.futures.Future[Answer] = dataclasses.field(default_factory=concurrent.futures.Future)

  def __post_init__(self):
    self.future.set_running_or_notify_cancel()  # so that a reader that is cancelled does not cancel it for others

  @property
  def unread(self) -> bool:
    """True when its client has gone away without the answer."""
    return not self.readers and not self.read

  def answer(self, answer: Answer) -> None:
    """Gives the answer to whoever waits for it, or comes back for it."""
    if not self.future.done():
      self.future.set_result(answer)

  def refuse(self, refusal: RequestRefused) -> None:
    """Gives a refusal instead, unless there is an answer already."""
    if not self.future.done():
      self.future.set_exception(refusal)


@dataclasses.dataclass(frozen=True)
class End:
  """The end of an agent's work.

  Attributes:
    reward: as it was said; None if nobody has said any.
    failure: the reason why the work has no outcome; None if it has.
  """

  reward: Any = None
  failure: BaseException | None = None


class Session:
  """One episode as its agent sees it, a `Backend` of the server, and the agent as the episode sees it.

  Attributes:
    id: names it in paths.
    key: an agent's API key.
    reward_key: the key with which its reward is given; whatever has only `key`, as the programs that an agent runs may
      have, cannot reward itself.
    data: the task, JSON values.
    models: the one name of the policy.
    requests: how many requests were taken up.
    unread: how many of them lost their client, which did not come back.
    repeated: how many were the same as the last one or as one that waited, and were sampled all the same.
  """

  max_choices, gives_logprobs = 1, False

  def __init__(self, data: Mapping[str, Any], *, environment: str = "agent", model: str = "policy"):
    self.id, self.key, self.reward_key = (secrets.token_urlsafe(size) for size in (12, 24, 24))
    self.data, self.environment, self.models = data, environment, (model,)
    self.requests = self.unread = self.repeated = 0
    self._lock = threading.Lock()
    self._waiting: collections.deque[Pending] = collections.deque()  # not taken up yet
    self._turn: Pending | None = None  # taken up last
    self._refusal: RequestRefused | None = None  # of every request from now on
    self._end: End | None = None
    self._claimed, self._closed = False, ""
    self._waker: concurrent.futures.Future[None] | None = None

  def task(self, url: str) -> AgentTask:
    """Describes the episode to its agent, for a server at `url`."""
    reward_url = f"{url}/sessions/{self.id}/reward"
    return AgentTask(self.id, f"{url}/v1", self.key, reward_url, self.reward_key, self.models[0], self.data)

  # The agent's side.

  async def chat(self, request: ChatRequest, emit: Emit | None = None) -> Answer:
    """Waits until the episode has answered the request, see `Backend.chat`."""
    turn, gone = self._enter(request), False
    try:
      return await asyncio.wrap_future(turn.future)
    except asyncio.CancelledError:
      gone = True
      raise
    finally:
      self._leave(turn, read=not gone)

  async def complete(self, request: CompletionRequest, emit: Emit | None = None) -> Answer:
    """Refuses texts without turns: an episode is a conversation."""
    raise RequestRefused(400, "A session takes chat completions only.", code="unsupported_endpoint")

  def claim(self) -> None:
    """Tells the episode that an agent plays it now."""
    with self._lock:
      self._claimed = True
      self._wake()

  def finish(self, reward: Any = None, failure: BaseException | None = None) -> None:
    """Ends the agent's work; what was said of it first holds."""
    with self._lock:
      self._finish(End(reward, failure))

  def give_reward(self, reward: float) -> None:
    """Ends the agent's work with its reward.

    Raises:
      RequestRefused: it has one, or has ended without.
    """
    with self._lock:
      if self._closed or self._end is not None:
        raise RequestRefused(409, f"The session is closed: {self._state()}.", code="session_closed")
      self._finish(End(reward))

  @property
  def has_ended(self) -> bool:
    """True once the agent's work has."""
    return self._end is not None

  @property
  def state(self) -> str:
    """Its state in a few words."""
    with self._lock:
      return self._state()

  # The episode's side.

  async def next(self, seconds: float) -> Pending | End:
    """Takes up the next request, or the end of the agent's work; the end comes first.

    Raises:
      TimeoutError: neither has come within so many seconds.
    """
    return await self._await(self._take, seconds)

  async def claimed(self, seconds: float) -> None:
    """Waits for an agent that claims the episode.

    Raises:
      TimeoutError: none has within so many seconds.
    """
    await self._await(lambda: self._claimed or None, seconds)

  async def ended(self, seconds: float) -> End:
    """Waits for the end of the agent's work.

    Raises:
      TimeoutError: it has not come within so many seconds.
    """
    return await self._await(lambda: self._end, seconds)

  def refuse(self, refusal: RequestRefused) -> None:
    """Refuses the request under way and all others from now on; the reward may still come."""
    with self._lock:
      self._refuse(refusal)

  def close(self, reason: str) -> bool:
    """Ends the session for good; returns False if it was closed before."""
    with self._lock:
      if self._closed:
        return False
      self._closed = reason
      self._refuse(_over(reason))
      self._wake()

      # It is remembered for a while, but not what was said in it.
      self.data, self._turn, self._end = {}, None, None
      return True

  # Both sides; the lock is held from here on.

  def _enter(self, request: ChatRequest) -> Pending:
    with self._lock:
      if self._refusal is not None:
        raise self._refusal.anew()
      same = [turn for turn in (self._turn, *self._waiting) if turn is not None and turn.request == request]
      if same and (same[0].unread or request.retried):  # its client has come back
        same[0].readers += 1
        return same[0]
      self.repeated += bool(same)
      self._waiting.append(turn := Pending(request))
      self._wake()
      return turn

  def _leave(self, turn: Pending, *, read: bool) -> None:
    with self._lock:
      turn.readers, turn.read = turn.readers - 1, turn.read or read
      if turn.unread and turn in self._waiting:
        self._waiting.remove(turn)

  def _take(self) -> Pending | End | None:
    if self._end is None and not self._waiting:
      return None
    self.unread += self._turn is not None and self._turn.unread
    if self._end is not None:
      return self._end
    self._turn = self._waiting.popleft()
    self.requests += 1
    return self._turn

  def _finish(self, end: End) -> None:
    if self._end is None and not self._closed:
      self._end = end
      self._refusal = self._refusal or _over(self._state())
      while self._waiting:
        self._waiting.popleft().refuse(self._refusal.anew())
      self._wake()

  def _refuse(self, refusal: RequestRefused) -> None:
    self._refusal = refusal
    for turn in (self._turn, *self._waiting):
      if turn is not None:
        turn.refuse(refusal.anew())
    self._waiting.clear()

  def _state(self) -> str:
    if self._closed:
      return self._closed
    if self._end is None:
      return "running"
    if self._end.failure is not None:
      return "failed"
    return "it has ended without a reward" if self._end.reward is None else "it has its reward"

  async def _await(self, look: Callable[[], T | None], seconds: float) -> T:
    """Waits until `look` finds something, with the lock."""
    async with asyncio.timeout(seconds):
      while True:
        with self._lock:
          if (found := look()) is not None:
            return found
          if self._closed:
            raise RuntimeError(f"the session is closed: {self._closed}")
          self._waker = waker = concurrent.futures.Future()
        await asyncio.wrap_future(waker)

  def _wake(self) -> None:
    waker, self._waker = self._waker, None
    if waker is not None and waker.set_running_or_notify_cancel():
      waker.set_result(None)


def _over(reason: str) -> RequestRefused:
  return RequestRefused(401, f"The session is closed: {reason}.", kind=UNAUTHORIZED, code="session_closed")
