"""Games of the textarena package, played from one seat: moves in, text to read out, the other seats filled.

Games draw from the generators that a whole process shares, and print. Each table therefore has states of its own for
them, which are in place only while its game computes; two tables never compute at the same time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sao_jax.episode import EnvironmentFailure, GraderFailure, InfrastructureFailure

Opponent = Callable[[str, random.Random], str]  # (all that the player was told, its own generator) -> its move

BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")  # moves as games write them: [4], [bet], [e2e4]
QUOTED = re.compile(r"['\"*]([A-Za-z]{1,20})['\"*]")  # and as they name them: 'rock', **fold**
GAME = -1  # the sender of messages that are no player's
MAX_WAIT = 60  # seconds for one call of other games; they take milliseconds
MAX_OPPONENT_MOVES = 1000  # in a row, beyond which nobody is playing any more
_computing = threading.Lock()  # the generators of a process are one resource


@dataclasses.dataclass(frozen=True)
class View:
  """The game as the policy's seat sees it after a move, or when it begins.

  Attributes:
    text: all that was said since its last turn.
    done: True when the game is over.
    invalid: True when its last move was none.
  """

  text: str
  done: bool
  invalid: bool = False


class GameTable:
  """One game. All methods block; one call at a time."""

  def __init__(self, game: Any, *, name: str, players: int, seat: int, seed: int, opponent: Opponent | None):
    """Sets the table, without beginning.

    Args:
      game: textarena's environment, of which the table plays a copy.
      name: of the environment, for failures.
      players: number of seats.
      seat: of the policy.
      seed: of everything that is random in the game.
      opponent: makes the moves of the other seats; None: each of them a random legal one.
    """
    self._game, self._name, self._players, self._seat, self._seed = game, name, players, seat, seed
    self._opponent, self._rng = opponent, random.Random(seed)
    self._random_states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
    self._heard = dict.fromkeys(range(players), "")
    self.opponent_errors = 0  # moves of the other seats that were none

  def begin(self) -> View:
    """Deals the game, and plays up to the policy's first turn."""
    self.deal()
    return self._until_own_turn(done=False)

  def deal(self) -> None:
    """Deals the game; nobody moves."""
    with self._own_random():
      self._env = copy_game(self._game)
      self._env.reset(num_players=self._players, seed=self._seed)
      self._core = unwrapped(self._env)

  def move(self, text: str) -> View:
    """Makes the policy's move; the other seats move until it is its turn again."""
    with self._own_random():
      done = bool(self._env.step(text)[0])
      invalid = _was_invalid(self._core.state, self._seat)
    return dataclasses.replace(self._until_own_turn(done), invalid=invalid)

  def result(self) -> dict[int, float]:
    """Returns the reward of every seat, when the game is over.

    Raises:
      GraderFailure: the game names no winner.
    """
    rewards = self._env.close()[0]
    if not isinstance(rewards, Mapping) or self._seat not in rewards:
      raise GraderFailure(self._name, f"the game ended without a reward for seat {self._seat}: {rewards!r:.80}")
    return dict(rewards)

  def _until_own_turn(self, done: bool) -> View:
    """Plays the other seats; what the policy's seat hears meanwhile is all for its next turn."""
    for _ in range(MAX_OPPONENT_MOVES):
      if done or self._core.state.current_player_id == self._seat:
        return View("" if done else self._listen(self._seat), done)
      player = self._core.state.current_player_id
      news = self._listen(player)
      self._heard[player] = f"{self._heard[player]}\n\n{news}".strip()

      # An opponent may wait for a server, so nothing is held while it thinks.
      told = self._heard[player]
      move = self._random_move(told) if self._opponent is None else str(self._opponent(told, self._rng))
      with self._own_random():
        done = bool(self._env.step(move)[0])
        self.opponent_errors += _was_invalid(self._core.state, player)
    raise EnvironmentFailure(self._name, f"the other seats have moved {MAX_OPPONENT_MOVES} times in a row")

  def _listen(self, player: int) -> str:
    """Takes what was told to a player since it last listened; of several boards the last one."""
    with self._own_random():
      _, messages = self._core.get_observation()
    if isinstance(messages, str):  # a game with its own way to observe
      return messages.strip()
    boards = [index for index, (_, _, kind) in enumerate(messages) if kind.name == "GAME_BOARD"]
    shown = []
    for index, (sender, text, kind) in enumerate(messages):
      is_move = kind.name == "PLAYER_ACTION"
      if index in boards[:-1] or (is_move and sender in (player, GAME)):  # who moved knows its move
        continue
      said_by = self._core.state.role_mapping.get(sender, f"Player {sender}")
      shown.append(f"[{said_by}] {text}" if is_move else str(text))
    return "\n".join(shown).strip()

  def _random_move(self, told: str) -> str:
    """Finds a legal move by trying possible ones on copies of the game.

    Raises:
      EnvironmentFailure: none of them is legal.
    """
    for moves in possible_moves(told):
      self._rng.shuffle(moves)
      for move in moves:
        if self._is_legal(move):
          return move
    raise EnvironmentFailure(self._name, "a random player found no legal move in what it was told: name an opponent")

  def _is_legal(self, move: str) -> bool:
    with self._own_random(keep=False):
      trial = copy_game(self._env)
      player = unwrapped(trial).state.current_player_id
      try:
        trial.step(move)
      except Exception:  # a game that breaks down on a move has not taken it
        return False
      return not _was_invalid(unwrapped(trial).state, player)

  @contextlib.contextmanager
  def _own_random(self, *, keep: bool = True) -> Iterator[None]:
    """Has the process's generators in this game's states; `keep=False` draws without effect on the game."""
    if not _computing.acquire(timeout=MAX_WAIT):
      problem = f"another game of this process has been computing for {MAX_WAIT} s, and cannot be ended"
      raise InfrastructureFailure(self._name, problem)
    before = random.getstate(), np.random.get_state()
    try:
      random.setstate(self._random_states[0])
      np.random.set_state(self._random_states[1])
      yield
      if keep:
        self._random_states = random.getstate(), np.random.get_state()
    finally:
      random.setstate(before[0])
      np.random.set_state(before[1])
      _computing.release()


def copy_game(game: Any) -> Any:
  """Copies a game as it stands. Dictionaries of words are shared: they are large, and nobody changes them."""
  shared = [value for value in vars(unwrapped(game)).values() if type(value).__name__ == "EnglishDictionary"]
  return copy.deepcopy(game, {id(value): value for value in shared})


def possible_moves(told: str) -> Iterator[list[str]]:
  """Gives moves to try, likely ones first: what stands in brackets or quotes and single digits, then pairs of digits.

  >>> next(possible_moves("Say 'heads' or [tails]."))[:3]
  ['[tails]', '[heads]', '[0]']
  """
  words = [f"[{word}]" for word in QUOTED.findall(told)]
  digits = [f"[{digit}]" for digit in range(10)]
  yield list(dict.fromkeys([*BRACKETS.findall(told), *words, *digits]))
  yield [f"[{first} {second}]" for first in range(10) for second in range(10)]


def unwrapped(game: Any) -> Any:
  """Returns the game within its wrappers, which repeat all that came before in every observation."""
  while "env" in vars(game):
    game = vars(game)["env"]
  return game


def _was_invalid(state: Any, player: int) -> bool:
  """Tells whether a player's last move was none: the game wants another one, or has ended by it."""
  return bool(getattr(state, "error_count", 0) or state.game_info[player].get("invalid_move"))
