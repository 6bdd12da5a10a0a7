"""All sessions of a server: found by key, claimed by agents that run by themselves, rewarded, looked at.

POST /sessions                       the admin key     claims an episode that waits for an agent
GET  /sessions/{session_id}          any of its keys   says how it stands
POST /sessions/{session_id}/reward   its reward key    {"reward": 1.0} ends it
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from sao_jax.episode import GraderFailure
from sao_jax.gateway.exchange import UNAVAILABLE, Backend, Call, Endpoint, RequestRefused, unknown_key
from sao_jax.gateway.sessions import Session
from sao_jax.rewards.scalar import check_reward

REMEMBERED = 4096  # closed sessions whose keys are still told apart from unknown ones
POLL = 0.05  # seconds between two looks for an episode to claim
REQUESTS_EACH = 4  # at a time, of one session: an agent that asks beside itself
LONGEST_WAIT = 300.0  # seconds that a claim may wait


class SessionBook:
  """The sessions of one server, its `Backends`; may be used from any thread.

  Attributes:
    url: the address for agents, without /v1; set once the server has one.
  """

  def __init__(self, admin_key: str):
    """`admin_key` is that of agents that claim episodes."""
    self.url = ""
    self._admin_key = admin_key
    self._lock = threading.Lock()
    self._by_id: dict[str, Session] = {}
    self._by_key: dict[str, Session] = {}
    self._unclaimed: collections.deque[Session] = collections.deque()
    self._closed: collections.deque[Session] = collections.deque()

  def open(self, data: Mapping[str, Any], *, environment: str, model: str, claimable: bool = False) -> Session:
    """Opens a session for a task; `claimable`: the next agent that asks gets it."""
    session = Session(data, environment=environment, model=model)
    with self._lock:
      self._by_id[session.id] = self._by_key[session.key] = session
      if claimable:
        self._unclaimed.append(session)
    return session

  def close(self, session: Session, reason: str) -> None:
    """Closes a session: its requests are refused from now on."""
    if not session.close(reason):
      return
    with self._lock:
      if session in self._unclaimed:
        self._unclaimed.remove(session)
      self._closed.append(session)
      if len(self._closed) > REMEMBERED:
        oldest = self._closed.popleft()
        del self._by_id[oldest.id], self._by_key[oldest.key]

  def room(self) -> int:
    """Returns how many requests at a time the sessions that are open may need."""
    return REQUESTS_EACH * (len(self._by_id) - len(self._closed))

  def find(self, key: str) -> Backend:
    """Returns the session of a key, see `Backends.find`."""
    with self._lock:
      session = self._by_key.get(key)
    if session is None:
      raise unknown_key(key)
    return session

  def endpoints(self) -> tuple[Endpoint, ...]:
    """The routes of the head of this module."""
    return (
      Endpoint("POST", "/sessions", self._claim),
      Endpoint("GET", "/sessions/{session_id}", self._look),
      Endpoint("POST", "/sessions/{session_id}/reward", self._reward),
    )

  async def _claim(self, call: Call) -> Mapping[str, Any]:
    if not secrets.compare_digest(call.key.encode(), self._admin_key.encode()):
      raise unknown_key(call.key)
    wait, environment = _claim_of(call.body)

    # Episodes begin as the run needs them: an agent waits for the next one.
    deadline = asyncio.get_running_loop().time() + wait
    while (session := self._take(environment)) is None:
      if asyncio.get_running_loop().time() >= deadline:
        problem = "No episode waits for an agent. Ask again, with `wait` seconds of patience."
        raise RequestRefused(503, problem, kind=UNAVAILABLE, code="no_episode")
      await asyncio.sleep(POLL)
    return dataclasses.asdict(session.task(self.url))

  async def _look(self, call: Call) -> Mapping[str, Any]:
    session = self._of(call, "key", "reward_key", admin=True)
    return {
      "id": session.id,
      "environment": session.environment,
      "state": session.state,
      "requests": session.requests,
    }

  async def _reward(self, call: Call) -> Mapping[str, Any]:
    session = self._of(call, "reward_key")
    try:
      reward = check_reward(call.body.get("reward"), session.environment)
    except GraderFailure as failure:
      raise RequestRefused(400, f"{failure.problem}.", param="reward", code="invalid_value") from failure
    session.give_reward(reward)
    return {"id": session.id, "state": session.state, "reward": reward}

  def _of(self, call: Call, *keys: str, admin: bool = False) -> Session:
    """Finds the session of a path, for whoever has one of these keys."""
    session = self._by_id.get(call.path["session_id"])
    allowed = [self._admin_key] if admin else []
    allowed += [getattr(session, name) for name in keys] if session is not None else []
    known = [secrets.compare_digest(call.key.encode(), key.encode()) for key in allowed]
    if session is None and call.key:
      raise RequestRefused(404, "There is no such session.", param="session_id", code="session_not_found")
    if not any(known):
      raise unknown_key(call.key)
    return session

  def _take(self, environment: str) -> Session | None:
    with self._lock:
      for session in self._unclaimed:
        if environment in ("", session.environment):
          self._unclaimed.remove(session)
          session.claim()
          return session
    return None


def _claim_of(body: Mapping[str, Any]) -> tuple[float, str]:
  """Reads the body of a claim: seconds to wait for an episode, and its environment, "" for any."""
  unknown = sorted(body.keys() - {"wait", "environment"})
  if unknown:
    raise RequestRefused(400, f"There is no field {unknown[0]!r}.", param=unknown[0], code="unknown_parameter")
  wait, environment = body.get("wait", 0.0), body.get("environment", "")
  if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0.0 <= wait <= LONGEST_WAIT:
    raise RequestRefused(400, f"wait: it must be 0 to {LONGEST_WAIT:g} seconds.", param="wait", code="invalid_value")
  if not isinstance(environment, str):
    raise RequestRefused(400, "environment: it must be a string.", param="environment", code="invalid_type")
  return float(wait), environment
