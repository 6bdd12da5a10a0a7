"""Environments behind OpenEnv's protocol: a server plays them, one session of it for each episode.

user        the first observation
assistant   thinking {"guess": 12}
user        the next observation
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.template import Message
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.chat_environment import ChatEnvironment, Reply
from sao_jax.environments.openenv_server import OpenEnvServer, check_package
from sao_jax.environments.openenv_text import (
  NoAction,
  action_instruction,
  action_reader,
  check_fields,
  observation_writer,
)
from sao_jax.environments.seeds import seeds_of
from sao_jax.environments.synchronous import Places
from sao_jax.environments.tool_output import MIN_TOKENS, clip_tokens
from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure, Prompt, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_text import without_thinking
from sao_jax.rewards.queueing import waiting
from sao_jax.settings import Reopened

T = TypeVar("T")

CODE = re.compile(r"\(code: (\w+)\)$")  # at the end of what the client says of a server's error
RETRY = 0.1  # seconds between two attempts to begin a session


class ServerFull(InfrastructureFailure):
  """The server has as many sessions as it allows, or has ended this one."""


FAILURES = {"CAPACITY_REACHED": ServerFull, "SESSION_ERROR": InfrastructureFailure}  # by the server's codes of errors


@dataclasses.dataclass(frozen=True)
class OpenEnv(Reopened):
  """Settings: the server, how actions are read and observations shown, and what a reward is. Needs extra `openenv`."""

  base_url: str = ""  # of a server that runs, http:// or https://
  app: str = ""  # or "module:application", which each process serves for itself on this machine
  name: str = "openenv"  # in prompt keys and metrics
  action: str = ""  # "": a JSON object; the one field that is said; or "module:function": (said) -> fields
  observation: str = ""  # "": all fields; the name of one; or "module:function": (fields) -> text
  reset_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every reset, beside the seed
  reward: Literal["each", "last"] = "each"  # a step's reward belongs to its turn, or only the last one counts
  unfinished_reward: float = 0.0  # of an episode that a limit cuts, added to what its steps gave
  sessions: int = 1  # episodes at a time, of this process; as many as the server allows: its max_concurrent_envs
  num_prompts: int = 10_000  # seeds in each split
  max_observation_tokens: int = 2048  # of each message; beyond, its middle is left out
  system_prompt: str | None = None  # None: the fields of an action, where it is a JSON object
  tokenizer_folder: str = ""  # a Hugging Face folder, or MODEL_CHECKPOINT; "": the byte tokenizer
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as enable_thinking
  answer_timeout: float = 60.0  # seconds for an answer of the server
  start_timeout: float = 120.0  # seconds for our own server to start; and for a place on one that is full

  def __post_init__(self):
    # One server, and only one.
    if bool(self.base_url) == bool(self.app):
      problem = f"There are two servers, {self.base_url!r} and {self.app!r}." if self.app else "There is no server."
      raise ConfigError("environment.base_url", problem, "Name one that runs in base_url, or its application in app.")
    if self.app and ":" not in self.app:
      raise ConfigError("environment.app", f"{self.app!r} is no application.", "Use 'module:application'.")

    # Values in their bounds.
    if self.reward not in ("each", "last"):
      raise ConfigError("environment.reward", f"{self.reward!r} is no reward.", 'Use "each" or "last".')
    for field, least in (("sessions", 1), ("num_prompts", 1), ("max_observation_tokens", MIN_TOKENS)):
      if getattr(self, field) < least:
        raise ConfigError(f"environment.{field}", f"{getattr(self, field)} is too few.", f"Use at least {least}.")
    for field in ("answer_timeout", "start_timeout"):
      if not 0.0 < getattr(self, field) < math.inf:
        problem = f"{getattr(self, field)} s is no time-out."
        raise ConfigError(f"environment.{field}", problem, "Use a finite number of seconds above 0.")
    if not math.isfinite(self.unfinished_reward):
      problem = f"{self.unfinished_reward} is no reward."
      raise ConfigError("environment.unfinished_reward", problem, "Use a finite number.")

    # Functions that can be imported.
    action_reader(self.action, "environment.action")
    observation_writer(self.observation, "environment.observation")

  @functools.cached_property
  def server(self) -> OpenEnvServer:
    """The server."""
    return OpenEnvServer(self.base_url, self.app, self.start_timeout)

  @functools.cached_property
  def places(self) -> Places:
    """The sessions of this process."""
    return Places(self.name, self.sessions)

  @functools.cached_property
  def action_schema(self) -> Mapping[str, Any]:
    """The JSON schema of an action; {} from a server that tells none."""
    return self.server.schema().get("action") or {}

  @functools.cached_property
  def _renderer(self) -> ChatRenderer:
    return ChatRenderer.of(self.tokenizer_folder, self.template_options)

  def tokenizer(self) -> Tokenizer:
    return self._renderer.tokenizer

  def make(self, tokenizer: Tokenizer) -> OpenEnvEpisode:
    return OpenEnvEpisode(self, self._renderer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    """Lists the seeds of a split; the server is started, and asked for its schema.

    Raises:
      ConfigError: the package is missing, or no server answers.
    """
    check_package()
    try:
      _ = self.action_schema
    except (OSError, ValueError) as error:
      field = "environment.app" if self.app else "environment.base_url"
      problem = f"No OpenEnv server answers at {self.base_url or self.app!r}: {error}."
      raise ConfigError(field, problem, "Start it, or correct the name.") from error

    numbers = seeds_of(self.name, split, self.num_prompts)
    return [Prompt(PromptKey(self.name, index, 0), {"seed": number}) for index, number in enumerate(numbers)]


class OpenEnvEpisode(ChatEnvironment):
  """One session of the server, as a chat."""

  def __init__(self, settings: OpenEnv, renderer: ChatRenderer):
    """Takes the settings' renderer."""
    super().__init__(settings.name, renderer)
    self._settings = settings
    self._read = action_reader(settings.action, "environment.action")
    self._show = observation_writer(settings.observation, "environment.observation")
    self._client: Any = None
    self._has_place = self._was_rewarded = False
    self._turns = self._action_errors = 0

  async def open(self, prompt: Prompt) -> Sequence[Message]:
    # A place among this process's sessions, then one on the server.
    place = self._settings.places.enter()
    try:
      with waiting():
        await asyncio.wrap_future(place)
    except asyncio.CancelledError:
      if not place.cancel():  # it had just been given
        self._settings.places.leave()
      raise
    self._has_place = True
    self._schema = await asyncio.to_thread(lambda: self._settings.action_schema)
    result = await self._begin({"seed": prompt.data["seed"], **self._settings.reset_options})
    if result.done:
      raise EnvironmentFailure(self.name, f"the episode with seed {prompt.data['seed']} is over before the first turn")

    system = self._settings.system_prompt
    if system is None:
      system = action_instruction(self._schema) if not self._settings.action and self._schema else ""
    return [*([{"role": "system", "content": system}] if system else []), self._message(result.observation)]

  async def respond(self, said: str) -> Reply:
    # A turn that holds no action is told so, and the environment stands still.
    self._turns += 1
    try:
      action = self._read(without_thinking(said) or "", self._schema)
      check_fields(action, self._schema)
      result = await self._ask("a step", self._client.step(action))
    except NoAction as error:
      self._action_errors += 1
      return Reply([self._text(f"Error: this is no action, {error}.")], info=self._info())

    reward = self._reward(result)
    if result.done:
      return Reply(done=True, reward=reward, info=self._info())
    return Reply([self._message(result.observation)], reward=reward, info=self._info())

  async def on_truncated(self, status: Status) -> float:
    return self._settings.unfinished_reward

  async def close(self) -> None:
    try:
      if self._client is not None:
        await self._client.close()
    finally:
      self._client = None
      if self._has_place:
        self._has_place = False
        self._settings.places.leave()

  async def _begin(self, options: Mapping[str, Any]) -> Any:
    """Opens a session and resets it; a server that is full is asked again for a while."""
    from openenv.core.generic_client import GenericEnvClient

    loop = asyncio.get_running_loop()
    deadline = loop.time() + self._settings.start_timeout
    while True:
      try:
        with waiting():  # a server of ours may have to start first
          url = await asyncio.to_thread(self._settings.server.url)
        self._client = GenericEnvClient(url, message_timeout_s=self._settings.answer_timeout)
        return await self._ask("a reset", self._client.reset(**options))
      except ServerFull:
        await self._client_closed()
        if loop.time() >= deadline:
          raise
        with waiting():
          await asyncio.sleep(RETRY)

  async def _client_closed(self) -> None:
    client, self._client = self._client, None
    if client is not None:
      await client.close()

  async def _ask(self, what: str, answer: Awaitable[T]) -> T:
    """Awaits an answer of the server.

    Raises:
      NoAction: the server does not take the action.
      InfrastructureFailure: the connection is lost, nobody answers in time, or the server is full.
      EnvironmentFailure: the environment itself has failed.
    """
    from websockets.exceptions import ConnectionClosedOK, WebSocketException

    try:
      return await answer
    except TimeoutError as error:
      problem = f"{what} was not answered within {self._settings.answer_timeout:g} s"
      raise InfrastructureFailure(self.name, problem) from error
    except ConnectionClosedOK as error:  # a full server says so, and may be gone before it was asked anything
      raise ServerFull(self.name, f"its server has closed the session in {what}") from error
    except (WebSocketException, OSError) as error:
      problem = f"the connection to its server was lost in {what}: {type(error).__name__}: {error!s:.200}"
      raise InfrastructureFailure(self.name, problem) from error
    except RuntimeError as error:
      code = CODE.search(str(error))
      if code is None:
        raise
      if code[1] == "VALIDATION_ERROR":
        raise NoAction("the environment does not take these values") from error
      kind = FAILURES.get(code[1], EnvironmentFailure)
      raise kind(self.name, f"{what} failed: {error!s:.200}") from error

  def _reward(self, result: Any) -> float | None:
    """Returns the reward of a step; the end needs one, unless steps before it had some.

    Raises:
      GraderFailure: the episode ends without any.
    """
    reward = result.reward
    if self._settings.reward == "last" and not result.done:
      return None
    if reward is None and result.done:
      if not self._was_rewarded:
        raise GraderFailure(self.name, "the episode ended without a reward")
      return 0.0
    self._was_rewarded |= reward is not None
    return float(reward) if isinstance(reward, bool) else reward

  def _info(self) -> dict[str, float]:
    return {"turns": float(self._turns), "action_errors": float(self._action_errors)}

  def _message(self, observation: Mapping[str, Any]) -> Message:
    return self._text(self._show(observation))

  def _text(self, text: str) -> Message:
    limit = self._settings.max_observation_tokens
    return {"role": "user", "content": clip_tokens(text, self._renderer.tokenizer, limit)}
