"""One episode of an agent that speaks OpenAI's API: its requests are the prompts and observations, its answers sampled.

    reset                starts the harness, waits for its first request, and returns that as the prompt
    step(action_ids)     answers the request with what was sampled, waits for the next one, returns what is new in it
    the harness's end    ends the episode, with its reward

So the tokens, log-probs, versions and limits of an agent's episode are those of any other environment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from sao_jax.chat.conversation import ChatRenderer, ChatSession
from sao_jax.environments.base import Environment, StepResult
from sao_jax.episode import GraderFailure, InfrastructureFailure, Prompt, Status
from sao_jax.errors import ConfigError
from sao_jax.gateway.assistant_turns import read_turn
from sao_jax.gateway.exchange import Answer, ChatRequest, RequestRefused
from sao_jax.gateway.harness import HarnessFailure, RunningHarness
from sao_jax.gateway.history import History
from sao_jax.gateway.sessions import End, Pending, Session
from sao_jax.rewards.queueing import waiting

if TYPE_CHECKING:
  from sao_jax.gateway.agent import Agent


class AgentSilent(InfrastructureFailure):
  """An agent has sent nothing for too long: no request, no end, no reward."""


class AgentEpisode(Environment):
  """One session of an agent.

  Whatever goes wrong on its side is a failure with a type, never a reward of 0: a harness that raises, one that is
  silent for `think_timeout` seconds, an end without a reward. An episode that was cut is no failure: its agent is told
  by an error of OpenAI's API, may still end with a reward for what it has, and earns 0 if it ends without one. But a
  harness that has not ended after `grace_seconds` is a failure.
  """

  def __init__(self, settings: Agent, renderer: ChatRenderer):
    self.name, self.stop_ids = settings.name, renderer.stop_ids
    self._settings, self._renderer = settings, renderer
    self._session: Session | None = None
    self._harness: RunningHarness | None = None

    # The request under way, the conversation that it belongs to, and the tokens of that.
    self._pending: Pending | None = None
    self._history: History | None = None
    self._chat: ChatSession | None = None
    self._context: list[Int[np.ndarray, "n"]] = []
    self._answered: tuple[ChatRequest, Answer] | None = None  # the last request that was
    self._segments = self._overridden = self._deviations = 0

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    self._data = prompt.data
    self._session = self._settings.open_session(prompt.data)
    self._harness = self._settings.start_harness(self._session)
    if self._harness is None:
      await self._await_claim()

    found = await self._next()
    if isinstance(found, End):
      raise found.failure or HarnessFailure(self.name, "the harness ended before its first request")
    return found[0]

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    self._answer(action_ids)
    found = await self._next()
    if isinstance(found, End):
      return StepResult(np.zeros(0, np.int32), True, await self._reward(found), self._info())
    token_ids, new_context = found
    return StepResult(token_ids, False, info=self._info(), new_context=new_context)

  async def on_truncated(self, status: Status) -> float:
    # An end that came before has nothing to do with the cut.
    if self._session.has_ended:
      return await self._reward(await self._session.ended(self._settings.grace_seconds))

    # An error that agents know, in words that their libraries look for, and do not try again: a context that is full.
    problem = f"This model's maximum context length is used up ({status.value}): end with what there is."
    self._session.refuse(RequestRefused(400, problem, param="messages", code="context_length_exceeded"))
    try:
      with waiting():
        end = await self._session.ended(self._settings.grace_seconds)
    except TimeoutError as error:
      # One of ours is at work still, maybe on its reward. Of others nobody knows: a later reward of theirs is refused.
      if self._harness is not None:
        problem = f"it has not ended {self._settings.grace_seconds:g} s (grace_seconds) after its episode was cut"
        raise HarnessFailure(self.name, f"the harness is at work still: {problem}") from error
      end = End()

    # Agents may fail because they were cut, and that is no reason to forget the episode; a lost sandbox or judge is.
    if end.failure is not None and not isinstance(end.failure, HarnessFailure):
      raise end.failure
    graded = end.reward is not None or self._settings.reward
    return await self._reward(End(end.reward)) if graded else 0.0

  async def close(self) -> None:
    if self._session is None:
      return
    ended = self._session.has_ended
    self._settings.gateway.book.close(self._session, "its episode is over")
    if self._harness is not None:
      await self._harness.stop(self._settings.grace_seconds if ended else 0.0)

  async def _await_claim(self) -> None:
    seconds = self._settings.claim_timeout
    try:
      with waiting():
        await self._session.claimed(seconds)
    except TimeoutError as error:
      problem = f"no agent has claimed the episode for {seconds:g} s"
      raise AgentSilent(self.name, problem) from error

  async def _next(self) -> End | tuple[Int[np.ndarray, "n"], bool]:
    """Waits for the agent: the tokens that lead to the next turn, and if they replace the context; or the end."""
    seconds = self._settings.think_timeout
    while True:
      try:
        with waiting():
          found = await self._session.next(seconds)
      except TimeoutError as error:
        begun = self._pending is not None
        problem = f"the agent has sent nothing for {seconds:g} s"
        raise AgentSilent(self.name, problem, retryable=not begun) from error
      if isinstance(found, End):
        return found

      # A template may refuse what the agent has sent: it is told, and may send something else.
      try:
        return await asyncio.to_thread(self._read, found)
      except ConfigError as error:
        self._history = None
        found.refuse(RequestRefused(400, f"{error}", param="messages", code="invalid_messages"))

  def _read(self, pending: Pending) -> tuple[Int[np.ndarray, "n"], bool]:
    """Renders a request: what is new in it, or, where it does not go on from the last answer, the whole."""
    request, first = pending.request, self._pending is None
    further = self._history.further(request) if self._history is not None else None
    if further is None:
      self._chat = self._renderer.start(request.messages, request.tools, rewrite=self._settings.rewrite)
      self._history = History(request)
      token_ids, new_segment = self._chat.prompt_ids, True
    else:
      continuation = self._chat.observe(further)
      token_ids, new_segment = continuation.token_ids, continuation.new_segment
      self._deviations += not continuation.exact

    # The account of it.
    self._context = [] if new_segment else self._context
    self._context.append(token_ids)
    self._segments += new_segment
    self._overridden += _has_own_sampling(request)
    self._pending = pending
    return token_ids, new_segment and not first

  def _answer(self, action_ids: Int[np.ndarray, "n"]) -> None:
    """Answers the request under way with what was sampled."""
    request = self._pending.request
    turn = read_turn(self._chat.act(action_ids), request.tools, call_format=self._settings.spoken_format)
    prompt_ids = np.concatenate(self._context)
    answer = Answer(
      content=turn.content if turn.content or not turn.tool_calls else None,
      finish_reason="tool_calls" if turn.tool_calls else "stop",
      reasoning_content=turn.reasoning_content,
      tool_calls=turn.tool_calls,
      prompt_tokens=len(prompt_ids),
      completion_tokens=len(action_ids),
      prompt_token_ids=prompt_ids.tolist() if request.token_facts else (),
      token_ids=action_ids.tolist() if request.token_facts else (),
    )
    self._context.append(action_ids)
    self._history.answered(answer)
    self._answered = request, answer
    self._pending.answer(answer)

  async def _reward(self, end: End) -> Any:
    """Returns the reward of an episode that has ended: the agent's, or that of the settings' function."""
    if end.failure is not None:
      raise end.failure
    if end.reward is not None:
      return end.reward
    if self._settings.reward:
      return await self._settings.graders.grade(self.name, self._data, self._conversation())
    problem = "the agent has ended without a reward: return it, post it, or name a function in the settings' `reward`"
    raise GraderFailure(self.name, problem)

  def _conversation(self) -> list[dict[str, Any]]:
    """Returns the messages up to the last answer."""
    if self._answered is None:
      return []
    request, answer = self._answered
    return [*map(dict, request.messages), _message(answer)]

  def _info(self) -> dict[str, float]:
    return {
      "requests": float(self._session.requests),
      "segments": float(self._segments),
      "unread_answers": float(self._session.unread),
      "repeated_requests": float(self._session.repeated),
      "overridden_requests": float(self._overridden),
      "template_deviations": float(self._deviations),
    }


def _has_own_sampling(request: ChatRequest) -> bool:
  """Tells if a request asks for other sampling than temperature 1 up to the run's limits, which no run heeds."""
  bounds = (request.max_tokens, request.seed)
  neutral = request.temperature in (None, 1.0) and request.top_p in (None, 1.0) and not request.stop
  return not neutral or request.must_call or any(bound is not None for bound in bounds)


def _message(answer: Answer) -> dict[str, Any]:
  """Writes an answer as the message that an agent would send back."""
  calls = [
    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    for call in answer.tool_calls
  ]
  return {"role": "assistant", "content": answer.content or ""} | ({"tool_calls": calls} if calls else {})
