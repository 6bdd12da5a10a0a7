"""Settings of the environment in which any agent that speaks OpenAI's API plays: the policy answers its requests.

The agent stays as it is. Each of its episodes has a base URL and an API key of its own, behind which a run samples,
records and trains as in any other environment.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from absl import logging

from sao_jax.chat.call_formats import check_format, find_format
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.data.mixed_prompts import MixedPrompts
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.base import Demonstration
from sao_jax.environments.scripted_chat import scripted_chat
from sao_jax.episode import NotPosed, Prompt, PromptKey, only_looked_at
from sao_jax.errors import ConfigError
from sao_jax.gateway.agent_episode import AgentEpisode
from sao_jax.gateway.harness import CommandHarness, FunctionHarness, HarnessLoop, RunningHarness, check_command
from sao_jax.gateway.listening import listen
from sao_jax.gateway.server import GatewayServer
from sao_jax.gateway.session_book import SessionBook
from sao_jax.gateway.sessions import Session
from sao_jax.rewards.grader_pool import GraderPool
from sao_jax.rewards.named_function import named_function
from sao_jax.settings import Reopened

ADMIN_KEY = "SAO_AGENT_KEY"  # the environment variable with the key of agents that run by themselves


@runtime_checkable
class TaskSource(Protocol):
  """Whatever has tasks; an environment's settings do, and `TaskRecords`."""

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    """Gives random access to the tasks of a split, see `EnvironmentSpec.prompts`."""
    ...


@dataclasses.dataclass(frozen=True)
class Agent(Reopened):
  """Settings: the harness, its tasks, its rewards, and the policy's way to speak."""

  harness: str | tuple[str, ...] | None  # "module:function", a command, or None: agents that claim their episodes
  tasks: TaskSource  # another environment's settings, whose prompts are the tasks, or TaskRecords
  name: str = "agent"  # in prompt keys and metrics
  reward: str = ""  # "module:function" of (data, messages), for episodes that end without a reward
  tokenizer_folder: str = ""  # a Hugging Face folder, or MODEL_CHECKPOINT; "": the byte tokenizer
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as enable_thinking
  call_format: Literal["", "hermes", "glm", "byte"] = ""  # of tool calls; "": the tokenizer's own
  rewrite: Literal["segment", "keep"] = "segment"  # where a template drops thinking: ChatSession says more
  model: str = "policy"  # the name that requests give
  think_timeout: float = 300.0  # seconds between an answer and the agent's next request, or its end
  claim_timeout: float = 300.0  # seconds that an episode waits for an agent of its own
  grace_seconds: float = 5.0  # for an agent to end by itself, once its episode was cut or has its reward
  grader_processes: int = 2  # of the reward function
  grader_timeout: float = 10.0  # seconds for one reward
  demonstrations: str = ""  # "module:function" of (data, rng), which returns (messages, tools, reward), for SFT
  host: str = "127.0.0.1"  # where agents reach the gateway
  port: int = 0  # of each process's own host; 0: a free one

  def __post_init__(self):
    check_format(self.call_format, "environment.call_format")
    if isinstance(self.harness, str):
      named_function(self.harness, "environment.harness")
    elif self.harness is not None:
      check_command(self.harness, "environment.harness")
    for field in ("reward", "demonstrations"):
      if getattr(self, field):
        named_function(getattr(self, field), f"environment.{field}")
    if not hasattr(self.tasks, "prompts"):
      remedy = "Use another environment's settings, or TaskRecords(file, fields)."
      raise ConfigError("environment.tasks", f"{self.tasks!r:.80} has no prompts.", remedy)

    # Waiting for ever would hold up a run that nobody serves.
    for field in ("think_timeout", "claim_timeout"):
      if not 0.0 < getattr(self, field) < float("inf"):
        problem = f"{getattr(self, field)} s is no time-out."
        raise ConfigError(f"environment.{field}", problem, "Use a finite number of seconds above 0.")
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
  def gateway(self) -> AgentGateway:
    """The sessions of these settings and the server in front of them; it starts when it is first asked for."""
    gateway = AgentGateway(self.host, self.port)
    if self.harness is None:
      # A key that was chosen is a secret, which stands in no log; one that was made up is known by nobody yet.
      key = f"that of {ADMIN_KEY}" if os.environ.get(ADMIN_KEY) else gateway.key
      logging.info("agents of environment %r claim episodes at %s/sessions, key: %s", self.name, gateway.url, key)
    return gateway

  @functools.cached_property
  def _loop(self) -> HarnessLoop:
    return HarnessLoop(self.name)

  @functools.cached_property
  def graders(self) -> GraderPool:
    """The processes that compute rewards."""
    function = named_function(self.reward, "environment.reward")
    return GraderPool(function, processes=self.grader_processes, timeout=self.grader_timeout)

  def tokenizer(self) -> Tokenizer:
    return self._renderer.tokenizer

  def make(self, tokenizer: Tokenizer) -> AgentEpisode:
    return AgentEpisode(self, self._renderer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    source = self.tasks.prompts(tokenizer, split, seed)
    if isinstance(source, MixedPrompts):  # tasks of several names, with equal ids and weights
      remedy = "Make an Agent of each of its environments, with a name of its own, and these the parts of a Mixture."
      raise ConfigError("environment.tasks", "The tasks of a mixture are those of several environments.", remedy)
    _ = self.gateway  # one that cannot be started is refused before work starts
    return _Tasks(source, self.name)

  @property
  def demonstration(self) -> Callable[[Prompt, Tokenizer, np.random.Generator], Demonstration]:
    """The expert: conversations that were written beforehand; settings without any make this an AttributeError."""
    if not self.demonstrations:
      raise AttributeError("these settings name no demonstrations")
    write = named_function(self.demonstrations, "environment.demonstrations")

    def demonstrate(prompt: Prompt, tokenizer: Tokenizer, rng: np.random.Generator) -> Demonstration:
      messages, tools, reward = write(prompt.data, rng)
      return scripted_chat(self._renderer, messages, reward, tools)

    return demonstrate

  def open_session(self, data: Mapping[str, Any]) -> Session:
    """Opens the session of an episode.

    Raises:
      NotPosed: an agent would have to claim it, and the prompt is only looked at.
    """
    claimable = self.harness is None
    if claimable and only_looked_at.get():
      raise NotPosed(self.name, "an agent has to claim the episode")
    return self.gateway.book.open(data, environment=self.name, model=self.model, claimable=claimable)

  def start_harness(self, session: Session) -> RunningHarness | None:
    """Starts the harness of a session, in the running event loop; None where an agent is to claim it."""
    task = session.task(self.gateway.url)
    if self.harness is None:
      return None
    if isinstance(self.harness, str):
      return FunctionHarness(named_function(self.harness, "environment.harness"), self._loop, session, task)
    return CommandHarness(self.harness, session, task)


class AgentGateway:
  """Sessions, and the server in front of them.

  Attributes:
    book: the sessions.
    url: the server's address, without /v1.
    key: the key with which agents claim episodes.
  """

  def __init__(self, host: str, port: int):
    """Starts the server.

    Raises:
      ConfigError: a package is missing, or the address is taken.
    """
    self.key = os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24)
    self.book = SessionBook(self.key)
    listener = listen(host, port, keyed=True, owner="environment.")
    self._server = GatewayServer(
      self.book, listener=listener, endpoints=self.book.endpoints(), further_requests=self.book.room
    ).start()
    self.url = self.book.url = self._server.root

  def close(self) -> None:
    """Stops the server."""
    self._server.stop()


class _Tasks(Sequence[Prompt]):
  """The tasks of others, as prompts of this environment."""

  def __init__(self, source: Sequence[Prompt], name: str):
    self._source, self._name = source, name

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Prompt:
    prompt = self._source[index]
    return dataclasses.replace(prompt, key=PromptKey(self._name, int(prompt.key.id), int(prompt.key.epoch)))
