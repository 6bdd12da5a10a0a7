"""Environments of the verifiers package, unchanged: its harness asks for the turns, its rewards end the episode.

verifiers runs an episode itself, and asks a model by OpenAI's API. That model is the policy: every request is a turn of
an ordinary episode of ours, in the tokens that were sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sao_jax.chat.call_formats import check_format, find_format
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError
from sao_jax.gateway.agent_episode import AgentEpisode
from sao_jax.gateway.harness import FunctionHarness, HarnessLoop, RunningHarness
from sao_jax.gateway.model_router import ModelRouter
from sao_jax.gateway.server import GatewayServer
from sao_jax.gateway.session_book import SessionBook
from sao_jax.gateway.sessions import End, Session
from sao_jax.gateway.verifiers_runner import Scored, VerifiersRunner
from sao_jax.settings import Reopened


@dataclasses.dataclass(frozen=True)
class Verifiers(Reopened):
  """Settings: the environment as verifiers writes it down, and the policy's way to speak."""

  environment: Mapping[str, Any]  # the block [env]: {"taskset": {"id": "MODULE"}, "agent": {"max_turns": 8}}
  heldout: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # another one for evaluation; {}: a tenth of it
  name: str = "verifiers"  # in prompt keys and metrics
  max_tasks: int = 10_000  # that are read of a set, which may be endless
  tokenizer_folder: str = ""  # a Hugging Face folder, or MODEL_CHECKPOINT; "": the byte tokenizer
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as enable_thinking
  call_format: Literal["", "hermes", "glm", "byte"] = ""  # of tool calls; "": the tokenizer's own
  rewrite: Literal["segment", "keep"] = "segment"  # where a template drops thinking: ChatSession says more
  think_timeout: float = 300.0  # seconds between a turn and the next one, or the reward
  grace_seconds: float = 10.0  # for an episode to end, and to be scored, once a limit of ours has cut it

  reward = ""  # of agents that end without one; these have theirs

  def __post_init__(self):
    check_format(self.call_format, "environment.call_format")
    if not self.environment:
      remedy = 'Write the block [env]: {"taskset": {"id": "MODULE"}}.'
      raise ConfigError("environment.environment", "It names no environment of verifiers.", remedy)
    if self.max_tasks < 1:
      raise ConfigError("environment.max_tasks", f"{self.max_tasks} tasks are none.", "Use at least 1.")
    if not 0.0 < self.think_timeout < float("inf"):
      problem = f"{self.think_timeout} s is no time-out."
      raise ConfigError("environment.think_timeout", problem, "Use a finite number of seconds above 0.")
    if not 0.0 <= self.grace_seconds < float("inf"):
      raise ConfigError("environment.grace_seconds", f"{self.grace_seconds} s cannot be waited.", "Use 0 or more.")

  @functools.cached_property
  def _renderer(self) -> ChatRenderer:
    return ChatRenderer.of(self.tokenizer_folder, self.template_options)

  @functools.cached_property
  def spoken_format(self) -> str:
    """The format of tool calls, see `sao_jax.chat.call_formats`."""
    return find_format(self.call_format, self.tokenizer())

  @functools.cached_property
  def gateway(self) -> VerifiersGateway:
    """The sessions of these settings and the server in front of them; it starts when it is first asked for."""
    return VerifiersGateway()

  @functools.cached_property
  def _loop(self) -> HarnessLoop:
    return HarnessLoop(self.name)

  @functools.cached_property
  def runners(self) -> dict[str, VerifiersRunner]:
    """The environment of each split, which may be the same one."""
    own = VerifiersRunner(self.environment, name=self.name, field="environment.environment", max_tasks=self.max_tasks)
    if not self.heldout:
      return {"train": own, "heldout": own}
    other = VerifiersRunner(self.heldout, name=self.name, field="environment.heldout", max_tasks=self.max_tasks)
    return {"train": own, "heldout": other}

  def tokenizer(self) -> Tokenizer:
    return self._renderer.tokenizer

  def make(self, tokenizer: Tokenizer) -> VerifiersEpisode:
    return VerifiersEpisode(self, self._renderer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    """Lists the tasks of a split; without a held-out environment, a tenth of the tasks is held out, by their content.

    Raises:
      ConfigError: the package is missing, or cannot load the environment or its tasks.
    """
    runner = self.runners[check_split(split)]
    indices = range(len(runner.tasks))
    if not self.heldout:
      indices = [index for index in indices if split_of(runner.content(index)) == split]
    _ = self.gateway  # one that cannot be started is refused before work starts
    return [
      Prompt(PromptKey(self.name, number, 0), {"task": index, "split": split}) for number, index in enumerate(indices)
    ]

  def open_session(self, data: Mapping[str, Any]) -> Session:
    """Opens the session of an episode."""
    return self.gateway.book.open(data, environment=self.name, model="policy")

  def start_harness(self, session: Session) -> RunningHarness:
    """Starts verifiers on the task of a session."""
    task = session.task(self.gateway.url)
    return FunctionHarness(self.runners[task.data["split"]].play, self._loop, session, task)

  def close(self) -> None:
    """Takes down what runs."""
    for runner in self.runners.values():
      runner.close()
    self.gateway.close()


class VerifiersEpisode(AgentEpisode):
  """One task, played by verifiers."""

  _facts: Mapping[str, float] = {}

  async def _reward(self, end: End) -> Any:
    if isinstance(end.reward, Scored):
      self._facts = end.reward.info
      end = End(end.reward.reward)
    return await super()._reward(end)

  def _info(self) -> dict[str, float]:
    return {**self._facts, **super()._info()}


class VerifiersGateway:
  """Sessions, and the server in front of them.

  Attributes:
    book: the sessions.
    url: the server's address, without /v1.
  """

  def __init__(self):
    """Starts the server on this machine alone."""
    self.book = SessionBook(admin_key="")
    self._server = GatewayServer(ModelRouter(self.book), further_requests=self.book.room).start()
    self.url = self.book.url = self._server.root

  def close(self) -> None:
    """Stops the server."""
    self._server.stop()
