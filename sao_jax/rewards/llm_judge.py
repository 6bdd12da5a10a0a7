"""A model as judge: grades answers through any endpoint that speaks OpenAI's chat completions (extra `judge`).

A verdict is read from one fixed form, see `judge_text`; a reply without one is asked for again, and is then a failure
of the grader, never a 0. An endpoint that is down, busy or silent is an `InfrastructureFailure`: the rollout side tries
again, and pauses where all attempts fail (`sao_jax.rollout.outages`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

from sao_jax.episode import GraderFailure, InfrastructureFailure
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_grader import PerEventLoop
from sao_jax.rewards.answer_text import without_thinking
from sao_jax.rewards.judge_text import PLACES, RUBRIC, TEMPLATE, read_verdict, shorten, write_request
from sao_jax.rewards.queueing import waiting
from sao_jax.settings import Reopened

BUSY = (408, 409, 429)  # statuses that say: later; as do all from 500 on
NO_KEY = "none"  # endpoints without keys take any


@dataclasses.dataclass(frozen=True)
class LLMJudge(Reopened):
  """Settings of a judge; they can stand where a scorer is named. The key itself is no setting.

  >>> judge = LLMJudge("http://127.0.0.1:8000/v1", "judge-model", rubric="Is it funny?", low=1, high=5)
  """

  base_url: str  # of the endpoint, such as https://api.openai.com/v1
  model: str  # name of the model there
  key_variable: str = ""  # environment variable with the key; "": the endpoint needs none
  rubric: str = RUBRIC  # says what is good
  template: str = TEMPLATE  # with {question} and {answer}, and perhaps {reference}: the right answer in the data
  low: float = 0.0  # the worst score, a reward of 0
  high: float = 10.0  # the best one, a reward of 1
  options: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024})
  max_characters: int = 40_000  # of an answer; of a longer one the middle is left out, and counted
  concurrency: int = 16  # requests at a time, in each event loop
  request_timeout: float = 20.0  # seconds for one request
  timeout: float = 28.0  # seconds for a verdict, retries included; less than rollout.environment_timeout
  retries: int = 4  # of a request that the endpoint could not serve, after pauses that double
  attempts: int = 3  # replies without a verdict, before the grader has failed

  def __post_init__(self):
    bounds = (
      ("base_url", self.base_url.startswith(("http://", "https://")), "an address that begins with http"),
      ("model", bool(self.model), "the name of a model"),
      ("high", self.low < self.high and math.isfinite(self.high - self.low), "more than low"),
      ("concurrency", self.concurrency >= 1, "at least 1"),
      ("attempts", self.attempts >= 1, "at least 1"),
      ("retries", self.retries >= 0, "at least 0"),
      ("max_characters", self.max_characters >= 1, "at least 1"),
      ("request_timeout", 0.0 < self.request_timeout < math.inf, "seconds above 0"),
      ("timeout", 0.0 < self.timeout < math.inf, "seconds above 0"),
      ("template", all(f"{{{name}}}" in self.template for name in PLACES[:2]), "a text with {question} and {answer}"),
    )
    for name, valid, wanted in bounds:
      if not valid:
        raise ConfigError(f"judge.{name}", f"{getattr(self, name)!r:.80} cannot work.", f"Use {wanted}.")

  @functools.cached_property
  def _clients(self) -> PerEventLoop[_Client]:
    return PerEventLoop(lambda: _Client(self))

  def check(self) -> None:
    """Refuses, before work starts, a machine where the package or the key is missing."""
    if importlib.util.find_spec("openai") is None:
      raise ConfigError("judge", "The package openai is not installed.", "Run: pip install -e '.[judge]'")
    self.key()

  def key(self) -> str:
    """Reads the key; raises a ConfigError where there should be one."""
    key = os.environ.get(self.key_variable, "") if self.key_variable else NO_KEY
    if not key:
      problem = f"The variable {self.key_variable} is not set."
      raise ConfigError("judge.key_variable", problem, "Export it, on all hosts.")
    return key

  def check_gold(self, gold: Any, field: str = "gold") -> None:
    """Takes any reference: the judge reads it."""

  async def grade(self, environment: str, question: str, said: str, gold: Any) -> tuple[float, dict[str, float]]:
    """Asks the judge; see `AnswerGrader`. The reward is within 0 and 1, and the facts begin with `judge_`."""
    began = time.monotonic()
    client = self._clients.get()
    with waiting():
      await client.free.acquire()
    try:
      async with asyncio.timeout(self.timeout):
        return await self._ask(client, environment, question, said, gold)
    except TimeoutError:
      seconds = time.monotonic() - began
      raise InfrastructureFailure(environment, f"the judge gave no verdict in {seconds:.3g} s") from None
    finally:
      client.free.release()

  async def close(self) -> None:
    """Closes the connections of this event loop; a process that ends need not."""
    client = self._clients.get()
    if client.openai is not None:
      await client.openai.close()
      client.openai = None

  async def _ask(
    self, client: _Client, environment: str, question: str, said: str, gold: Any
  ) -> tuple[float, dict[str, float]]:
    answer, left_out = shorten(said, self.max_characters)
    facts = dict.fromkeys(("judge_requests", "judge_retries", "judge_prompt_tokens", "judge_reply_tokens"), 0.0)
    began, shown = time.monotonic(), ""

    for _ in range(self.attempts):
      # A new word each time: nothing that was written before can be a verdict.
      word, scale = secrets.token_hex(4), (self.low, self.high)
      message = write_request(self.template, self.rubric, word, scale, question=question, answer=answer, reference=gold)
      reply, usage = await client.complete(environment, message)

      # A reply without a verdict has cost something, too.
      for name, count in usage.items():
        facts[name] += count
      shown = without_thinking(reply) or ""
      score = read_verdict(shown, word, scale)
      if score is not None:
        seconds = time.monotonic() - began
        return score, facts | {"judge_seconds": seconds, "judge_characters_left_out": float(left_out)}
    raise GraderFailure(environment, f"the judge gave no score in {self.attempts} replies, the last: {shown[-80:]!r}")


class _Client:
  """The connections to the endpoint in one event loop."""

  def __init__(self, settings: LLMJudge):
    self._settings = settings
    self.free = asyncio.Semaphore(settings.concurrency)
    self.openai: Any = None
    self._connecting = asyncio.Lock()

  async def complete(self, environment: str, message: str) -> tuple[str, dict[str, float]]:
    """Sends one message; returns the reply, "" for one that cannot be read, and what it cost."""
    settings = self._settings
    key = settings.key()
    async with self._connecting:
      if self.openai is None:
        self.openai = await asyncio.to_thread(_connect, settings, key)  # the import takes a second
    import openai

    # The package retries by itself, with pauses that double, or as long as the endpoint asks for.
    request = {"model": settings.model, "messages": [{"role": "user", "content": message}], **settings.options}
    try:
      raw = await self.openai.chat.completions.with_raw_response.create(**request)
    except openai.APIStatusError as error:
      said = str(error.message).replace(key, "...")[:300]
      problem = f"the judge at {settings.base_url} answered with status {error.status_code}: {said}"
      down = error.status_code in BUSY or error.status_code >= 500
      raise (InfrastructureFailure if down else GraderFailure)(environment, problem) from None
    except openai.APIConnectionError as error:  # time-outs, too
      cause = error.__cause__ or error
      problem = f"the judge at {settings.base_url} cannot be reached: {type(cause).__name__}: {cause}"[:300]
      raise InfrastructureFailure(environment, problem) from None

    # Whatever came back may be nothing of the kind.
    usage = {"judge_requests": 1.0, "judge_retries": float(raw.retries_taken)}
    try:
      completion = raw.parse()
      reply = completion.choices[0].message.content
      if completion.usage is not None:
        usage["judge_prompt_tokens"] = float(completion.usage.prompt_tokens)
        usage["judge_reply_tokens"] = float(completion.usage.completion_tokens)
    except (openai.OpenAIError, ValueError, TypeError, AttributeError, LookupError):
      return "", usage
    return reply if isinstance(reply, str) else "", usage


def _connect(settings: LLMJudge, key: str) -> Any:
  import openai

  for name in ("httpx", "openai"):  # a line for each request
    logging.getLogger(name).setLevel(logging.WARNING)
  return openai.AsyncOpenAI(
    base_url=settings.base_url, api_key=key, timeout=settings.request_timeout, max_retries=settings.retries
  )
