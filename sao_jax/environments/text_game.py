"""Games of the textarena package as chats: each turn is a move, the reward is what the game says when it is over.

    user        the rules, and the board or whatever else the game shows
    assistant   thinking [4]
    user        what has happened since, other players' moves included

Games for one player, and games against others, whose seats a function or a random player fills. A prompt is a seed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.template import Message
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.chat_environment import ChatEnvironment, Reply
from sao_jax.environments.game_table import GameTable, Opponent, View
from sao_jax.environments.seeds import seeds_of
from sao_jax.environments.textarena_games import load_game
from sao_jax.environments.tool_output import MIN_TOKENS, clip_tokens
from sao_jax.episode import EnvironmentFailure, Prompt, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.rewards.answer_text import without_thinking
from sao_jax.rewards.named_function import named_function
from sao_jax.settings import Reopened

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TextGame(Reopened):
  """Settings: the game by its id, who else plays, and how much of it is shown. Needs the extra `textarena`.

  The splits hold other seeds, which is all that they can: where a game has few beginnings, both have the same ones.
  """

  game: str  # textarena's id, as in "GuessTheNumber-v0"
  name: str = "text_game"  # in prompt keys and metrics
  players: int = 1  # seats; those of others are filled by `opponent`
  opponent: str = "random"  # a random legal player, or "module:function": (all that it was told, Random) -> its move
  seat: int | None = None  # of the policy, from 0; None: each in turn
  unfinished_reward: float | None = None  # of a game that a limit cuts; None: 0 alone, and -1 against others, a loss
  num_prompts: int = 10_000  # seeds in each split
  max_observation_tokens: int = 2048  # of each message; beyond, its middle is left out
  system_prompt: str = ""
  nltk_folder: str = ""  # of the sets of words that games with words need
  tokenizer_folder: str = ""  # a Hugging Face folder, or MODEL_CHECKPOINT; "": the byte tokenizer
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as enable_thinking
  threads: int = 16  # games that compute, or wait for an opponent, at the same time

  def __post_init__(self):
    # Numbers in their bounds: a prompt without a seat, say, would fail in the middle of a run.
    if self.num_prompts < 1:
      raise ConfigError("environment.num_prompts", f"{self.num_prompts} prompts are none.", "Use at least 1.")
    if self.players < 1:
      raise ConfigError("environment.players", f"{self.players} seats are none.", "Use at least 1.")
    if self.seat is not None and not 0 <= self.seat < self.players:
      remedy = f"Use 0 to {self.players - 1}, or None for each in turn."
      raise ConfigError("environment.seat", f"There is no seat {self.seat} among {self.players}.", remedy)
    if self.max_observation_tokens < MIN_TOKENS:
      problem = f"{self.max_observation_tokens} tokens leave nothing to see."
      raise ConfigError("environment.max_observation_tokens", problem, f"Use at least {MIN_TOKENS}.")
    if self.unfinished_reward is not None and not math.isfinite(self.unfinished_reward):
      problem = f"{self.unfinished_reward} is no reward."
      raise ConfigError("environment.unfinished_reward", problem, "Use a finite number, or None.")
    if self.threads < 1:
      raise ConfigError("environment.threads", f"{self.threads} threads play nothing.", "Use at least 1.")

    # A function that is not there would be missed by the first game only.
    self._opponent_function()

  @functools.cached_property
  def _renderer(self) -> ChatRenderer:
    return ChatRenderer.of(self.tokenizer_folder, self.template_options)

  @functools.cached_property
  def _game(self) -> Any:
    """The game that every episode plays a copy of."""
    return load_game(self.game, self.nltk_folder)

  @functools.cached_property
  def _threads(self) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(self.threads, thread_name_prefix=f"games of {self.name}")

  def tokenizer(self) -> Tokenizer:
    return self._renderer.tokenizer

  def make(self, tokenizer: Tokenizer) -> TextGameEpisode:
    return TextGameEpisode(self, self._renderer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    """Lists the seeds of a split, with the policy's seat.

    Raises:
      ConfigError: the game cannot be played here, or not with so many players.
    """
    numbers = seeds_of(self.game, split, self.num_prompts)
    seats = range(self.players) if self.seat is None else [self.seat]
    prompts = [
      Prompt(PromptKey(self.name, index, 0), {"seed": number, "seat": seats[index % len(seats)]})
      for index, number in enumerate(numbers)
    ]
    _ = self._game  # one that cannot be played here is refused by its own error
    try:
      self.table(prompts[0]).deal()
    except Exception as error:
      problem = f"{self.game!r} does not begin with {self.players} players: {type(error).__name__}: {error!s:.200}"
      remedy = "Use as many players as the game is for (textarena.envs lists them), or another game."
      raise ConfigError("environment.players", problem, remedy) from error
    return prompts

  def table(self, prompt: Prompt) -> GameTable:
    """Sets a table for the game of a prompt."""
    seed, seat, opponent = prompt.data["seed"], prompt.data["seat"], self._opponent_function()
    return GameTable(self._game, name=self.name, players=self.players, seat=seat, seed=seed, opponent=opponent)

  async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
    """Makes a call that computes, or waits."""
    return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

  def _opponent_function(self) -> Opponent | None:
    if self.opponent == "random":
      return None
    remedy = "Use 'random', or 'module:function'."
    function = named_function(self.opponent, "environment.opponent", kind="opponent", remedy=remedy)
    return lambda told, rng: _checked_move(function, told, rng)


def _checked_move(function: Callable[[str, random.Random], Any], told: str, rng: random.Random) -> str:
  """Asks an opponent for its move, which is a text."""
  move = function(told, rng)
  if not isinstance(move, str):
    raise TypeError(f"the opponent's move {move!r:.80} is no text")
  return move


class TextGameEpisode(ChatEnvironment):
  """One game, as a chat."""

  def __init__(self, settings: TextGame, renderer: ChatRenderer):
    """Takes the settings' renderer."""
    super().__init__(settings.name, renderer)
    self._settings = settings
    self._turns = self._invalid_moves = 0

  async def open(self, prompt: Prompt) -> Sequence[Message]:
    self._seat = prompt.data["seat"]
    self._table = await self._play(self._settings.table, prompt)
    view = await self._play(self._table.begin)
    if view.done:
      raise EnvironmentFailure(self.name, f"the game with seed {prompt.data['seed']} is over before the first move")
    system = self._settings.system_prompt
    return [*([{"role": "system", "content": system}] if system else []), self._message(view)]

  async def respond(self, said: str) -> Reply:
    # A turn that is all thinking is no move, which the game says itself.
    view = await self._play(self._table.move, (without_thinking(said) or "").strip())
    self._turns += 1
    self._invalid_moves += view.invalid
    info = {
      "game_turns": float(self._turns),
      "invalid_moves": float(self._invalid_moves),
      "opponent_invalid_moves": float(self._table.opponent_errors),
    }
    if not view.done:
      return Reply([self._message(view)], info=info)

    # The end: every seat has its reward.
    rewards = await self._play(self._table.result)
    own = rewards[self._seat]
    best = max([reward for seat, reward in rewards.items() if seat != self._seat], default=-math.inf)
    if self._settings.players > 1:
      info |= {"won": float(own > best), "drawn": float(own == best)}
    return Reply(done=True, reward=own, info=info)

  async def on_truncated(self, status: Status) -> float:
    reward = self._settings.unfinished_reward
    return reward if reward is not None else (0.0 if self._settings.players == 1 else -1.0)

  def _message(self, view: View) -> Message:
    limit, tokenizer = self._settings.max_observation_tokens, self._renderer.tokenizer
    return {"role": "user", "content": clip_tokens(view.text or "It is your turn.", tokenizer, limit)}

  async def _play(self, function: Callable[..., T], *arguments: Any) -> T:
    """Makes a call of the game in a thread.

    Raises:
      EnvironmentFailure: the game, or an opponent, has broken down: nobody's loss.
    """
    try:
      return await self._settings.in_thread(function, *arguments)
    except (EnvironmentFailure, OSError):
      raise
    except Exception as error:
      problem = f"{self._settings.game} raised {type(error).__name__}: {error!s:.200}"
      raise EnvironmentFailure(self.name, problem) from error
