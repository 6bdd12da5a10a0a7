"""Corridor: a tool task of graded length and difficulty, in few tokens, in which a critic has something to predict.

    <|bos|><|user|>mw2          prompt: medium, key w, and the sign at the first of `horizon` doors
    d<|end|>B                   action, and the sign at the second door
    ..b<|end|>6                 pauses have no use, and do no harm
    c<|end|>?                   a near miss leads into a side room: `<` leads back to the door, at the cost of a repair
    <<|end|>6                   ... of which there are few
    f<|end|>x                   a dead end
    a<|end|>x                   the walk goes on, and earns 0 whatever comes
    <|end|>                     an empty turn ends it

A plain door, A to F, opens to its own letter. A locked one, 1 to 6, opens to the letter that the key says: key u to the
letter of its number, key v to the next one, ... and behind f comes a. The letter behind the right one is the near miss;
all other words end in a dead end, and so does a near miss when no repair is left. The reward is 1 behind the last door,
else 0; nothing is earned before the end.

Corridors are easy (plain doors), hard (locked ones) or medium (either); the prompt says so. The expert of `demonstrate`
is the less sure the longer and harder a corridor: whatever its length, a walk of an easy one ends well in
`easy_success`, that of a hard one in `hard_success`. So imitation leaves the same to learn at all horizons.

`dead_ends` says how a dead end shows: "marked" in each of its rooms, "once" in the first of them, or "silent": doors
follow as if nothing had happened, and only who compares the signs with the words knows. In all three the prefix says
that the reward will be 0, which a critic can learn, and a mean over rollouts of the prompt cannot.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.base import Demonstration, Environment, StepResult
from sao_jax.environments.token_turns import turns_of
from sao_jax.episode import Prompt, PromptKey
from sao_jax.errors import ConfigError

LEVELS = ("easy", "medium", "hard")
WORDS, PLAIN, LOCKED, KEYS = "abcdef", "ABCDEF", "123456", "uvwxyz"
BACK, PAUSE, SIDE_ROOM, DEAD_END = "<", ".", "?", "x"
CLUTTER = "!#$%&*+,-/:;=@^_|~"
MAX_DRAWS = 1000
MAX_MISSES = 200  # draws without a new held-out corridor, which is a tenth of what there is: then nearly all are found
MAX_HELDOUT = 600  # held-out corridors, where there are more
MAX_PAUSES = 3  # of the expert, in one turn
LEAVING = 0.1  # chance that the expert ends a walk, at each turn in a dead end

MISTAKES = ("one off", "two off", "three off", "leave")  # of the expert, equally likely; the first is a near miss


@dataclasses.dataclass(frozen=True)
class Corridor:
  """Settings of the task."""

  name: str = "corridor"
  horizon: int = 3  # doors, each of which takes a call at least
  levels: tuple[str, ...] = LEVELS  # of the prompts, equally many of each
  repairs: int | None = None  # near misses that can be repaired; None: horizon // 5, and one at least
  dead_ends: str = "marked"  # or "once", or "silent"
  clutter: int = 0  # tokens of no meaning in front of every sign
  easy_success: float = 0.85  # chance that the expert walks through an easy corridor without a lasting mistake
  hard_success: float = 0.15
  pauses: float = 0.2  # chance that the expert pauses, and pauses again
  num_prompts: int = 100_000  # per epoch, in which short corridors repeat; held-out ones do not, and may be fewer

  def __post_init__(self):
    checks = (
      ("horizon", self.horizon >= 1, "at least 1"),
      ("levels", bool(self.levels) and set(self.levels) <= {*LEVELS}, f"some of {', '.join(LEVELS)}"),
      ("repairs", self.repairs is None or self.repairs >= 0, "at least 0, or None"),
      ("dead_ends", self.dead_ends in ("marked", "once", "silent"), "marked, once or silent"),
      ("clutter", self.clutter >= 0, "at least 0"),
      ("easy_success", 0.0 < self.easy_success <= 1.0, "a chance above 0"),
      ("hard_success", 0.0 < self.hard_success <= 1.0, "a chance above 0"),
      ("pauses", 0.0 <= self.pauses < 1.0, "at least 0, and less than 1"),
      ("num_prompts", self.num_prompts >= 1, "at least 1"),
    )
    for field, valid, remedy in checks:
      if not valid:
        raise ConfigError(f"environment.{field}", f"{getattr(self, field)!r} cannot work.", f"Use {remedy}.")

  @property
  def num_repairs(self) -> int:
    """Near misses that can be repaired."""
    return max(1, self.horizon // 5) if self.repairs is None else self.repairs

  @property
  def max_calls(self) -> int:
    """Turns of the longest walk: a near miss takes two more."""
    return self.horizon + 2 * self.num_repairs

  def tokenizer(self) -> ByteTokenizer:
    return ByteTokenizer()

  def make(self, tokenizer: ByteTokenizer) -> CorridorEpisode:
    return CorridorEpisode(self, tokenizer)

  def prompts(self, tokenizer: ByteTokenizer, split: str, seed: int) -> Sequence[Prompt]:
    return HeldoutCorridors(self, seed) if check_split(split) == "heldout" else TrainingCorridors(self, seed)

  def demonstration(self, prompt: Prompt, tokenizer: ByteTokenizer, rng: np.random.Generator) -> Demonstration:
    """Plays the expert, who makes mistakes on purpose."""
    return demonstrate(self, prompt, tokenizer, rng)

  def states(self, token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]) -> list[Hashable]:
    """Tells the task's state before every sampled token of an episode: see `states_of`."""
    return states_of(self, token_ids, action_mask)


class TrainingCorridors(Sequence[Prompt]):
  """Prompts by index, which take turns in level: the first training corridor of the draws (seed, index, 0), ..."""

  def __init__(self, settings: Corridor, seed: int):
    self._settings, self._seed = settings, seed

  def __len__(self) -> int:
    return self._settings.num_prompts

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    settings, index = self._settings, int(index)
    level = settings.levels[index % len(settings.levels)]
    for draw in range(MAX_DRAWS):
      corridor = draw_corridor(np.random.default_rng((self._seed, index, draw)), level, settings.horizon)
      if split_of(" ".join(corridor.values())) == "train":
        return Prompt(PromptKey(settings.name, index, 0), corridor)
    raise _too_few(settings)


class HeldoutCorridors(Sequence[Prompt]):
  """Held-out corridors, all different, so that the trials of an evaluation are independent; levels take turns.

  There are min(`num_prompts`, MAX_HELDOUT) of them, or fewer when short corridors allow no more.
  """

  def __init__(self, settings: Corridor, seed: int):
    most = -(-min(settings.num_prompts, MAX_HELDOUT) // len(settings.levels))
    found = [self._draw(settings, level, seed, most) for level in settings.levels]
    self._corridors = [one for turn in itertools.zip_longest(*found) for one in turn if one is not None]
    self._name = settings.name
    if not self._corridors:
      raise _too_few(settings)

  def _draw(self, settings: Corridor, level: str, seed: int, most: int) -> list[dict[str, str]]:
    """Draws until there are enough, or hardly anything new comes."""
    rng, found, misses = np.random.default_rng((seed, LEVELS.index(level))), {}, 0
    while len(found) < most and misses < MAX_MISSES:
      corridor = draw_corridor(rng, level, settings.horizon)
      text, misses = " ".join(corridor.values()), misses + 1
      if text not in found and split_of(text) == "heldout":
        found[text], misses = corridor, 0
    return [*found.values()]

  def __len__(self) -> int:
    return len(self._corridors)

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < len(self):
      raise IndexError(index)
    return Prompt(PromptKey(self._name, int(index), 0), self._corridors[int(index)])


def _too_few(settings: Corridor) -> ConfigError:
  return ConfigError("environment.horizon", f"{settings.horizon} doors make too few corridors.", "Raise it.")


def draw_corridor(rng: np.random.Generator, level: str, horizon: int) -> dict[str, str]:
  """Draws a key and the signs at the doors; returns the data of a prompt."""
  locked = rng.random(horizon) < {"easy": 0.0, "medium": 0.5, "hard": 1.0}[level]
  key, *places = rng.integers(len(WORDS), size=1 + horizon)
  return {
    "level": level,
    "key": KEYS[key],
    "doors": "".join((LOCKED if shut else PLAIN)[place] for shut, place in zip(locked, places)),
  }


def right_word(sign: str, key: str) -> str:
  """Returns the word that opens a door.

  >>> [right_word("C", "z"), right_word("1", "u"), right_word("2", "w"), right_word("6", "v")]
  ['c', 'a', 'd', 'a']
  """
  place = PLAIN.index(sign) if sign in PLAIN else LOCKED.index(sign) + KEYS.index(key)
  return WORDS[place % len(WORDS)]


@dataclasses.dataclass(frozen=True)
class Walk:
  """Place of a walk.

  Attributes:
    door: doors behind it.
    room: "door", in front of the next one; "side", in a side room beside it; "dead", in a dead end.
    repairs: near misses that can still be repaired.
  """

  door: int
  room: Literal["door", "side", "dead"]
  repairs: int

  def after(self, word: str | None, right: str) -> Walk:
    """Goes on by a word, None for what is none, where `right` opens the door; in a dead end doors open to any."""
    if self.room == "dead":
      return dataclasses.replace(self, door=self.door + 1)
    if self.room == "side":
      return dataclasses.replace(self, room="door") if word == BACK else Walk(self.door + 1, "dead", self.repairs)
    if word == right:
      return dataclasses.replace(self, door=self.door + 1)
    if word == next_word(right) and self.repairs:
      return Walk(self.door, "side", self.repairs - 1)
    return Walk(self.door + 1, "dead", self.repairs)


def next_word(word: str, by: int = 1) -> str:
  """Returns the word `by` places behind it; behind the last comes the first."""
  return WORDS[(WORDS.index(word) + by) % len(WORDS)]


class CorridorEpisode(Environment):
  """One walk. `begin` and `respond` are the synchronous core of `reset` and `step`: they never wait."""

  def __init__(self, settings: Corridor, tokenizer: ByteTokenizer):
    self.name, self.stop_ids = settings.name, (tokenizer.end_id,)
    self._settings, self._tokenizer = settings, tokenizer

  async def reset(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    return self.begin(prompt)

  async def step(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    return self.respond(action_ids)

  @property
  def walk(self) -> Walk:
    """The place of the walk."""
    return self._walk

  def begin(self, prompt: Prompt) -> Int[np.ndarray, "n"]:
    """Starts the walk in front of the first door; returns the token ids of the prompt."""
    self._data, self._calls = prompt.data, 0
    self._walk = Walk(0, "door", self._settings.num_repairs)
    shown = f"<|bos|><|user|>{self._data['level'][0]}{self._data['key']}"
    return np.concatenate([self._tokenizer.encode_with_specials(shown), self._observation(first=True)])

  def respond(self, action_ids: Int[np.ndarray, "n"]) -> StepResult:
    """Answers one action: goes on by its word, and shows the next sign; or ends the walk."""
    word, before = read_word(self._tokenizer, action_ids), self._walk
    self._calls += 1
    left = word == ""
    if not left:
      self._walk = before.after(word, self._right)

    # Behind the last door, or where the policy leaves, the walk ends.
    if left or self._walk.door == len(self._data["doors"]):
      alive = self._walk.room != "dead"
      reward = float(alive and not left)
      info = {
        "calls": float(self._calls),
        "doors": self._walk.door / len(self._data["doors"]),
        "dead_end": float(not alive),
        "left_early": float(left and alive),
        "repairs": float(self._settings.num_repairs - self._walk.repairs),
        f"solved_{self._data['level']}": reward,
      }
      return StepResult(np.zeros(0, dtype=np.int32), True, reward, info)
    entered = self._walk.room == "dead" and before.room != "dead"
    return StepResult(self._observation(first=entered), False)

  @property
  def _right(self) -> str:
    return right_word(self._data["doors"][self._walk.door], self._data["key"])

  def _observation(self, *, first: bool) -> Int[np.ndarray, "n"]:
    """Shows what there is to see, behind clutter; `first`: the room is the first of its kind."""
    settings, room = self._settings, self._walk.room
    marked = settings.dead_ends == "marked" or (settings.dead_ends == "once" and first)
    sign = self._data["doors"][self._walk.door]
    if room == "side":
      sign = SIDE_ROOM
    elif room == "dead" and marked:
      sign = DEAD_END

    return self._tokenizer.encode(self._clutter() + sign)

  def _clutter(self) -> str:
    """Draws what has no meaning; by the corridor and the call alone, so that rollouts of a prompt may be compared."""
    if not self._settings.clutter:
      return ""
    number = int.from_bytes(self._data["doors"].encode()[:8], "big")
    chosen = np.random.default_rng((number, self._calls)).integers(len(CLUTTER), size=self._settings.clutter)
    return "".join(CLUTTER[index] for index in chosen)


def read_word(tokenizer: ByteTokenizer, action_ids: Int[np.ndarray, "n"]) -> str | None:
  """Reads an action: its word behind the pauses, "" for an empty turn, None for what is neither."""
  ids = np.asarray(action_ids)
  if not len(ids) or ids[-1] != tokenizer.end_id:
    return None
  text = tokenizer.decode_bytes(ids[:-1])
  if text is None:
    return None
  word = text.lstrip(PAUSE)
  return word if len(word) == 1 or not text else None


def error_rates(settings: Corridor) -> tuple[float, float]:
  """Returns the expert's chances of a mistake at a plain and at a locked door.

  All mistakes but near misses are lasting ones. Of those it makes none in a corridor of `horizon` equal doors with the
  chance that the settings name.
  """
  lasting = 1 - 1 / len(MISTAKES)
  of = lambda success: min(1.0, (1 - success ** (1 / settings.horizon)) / lasting)
  return of(settings.easy_success), of(settings.hard_success)


def demonstrate(
  settings: Corridor, prompt: Prompt, tokenizer: ByteTokenizer, rng: np.random.Generator
) -> Demonstration:
  """Plays one whole walk against the environment itself, so the ids are exactly those of a real one."""
  episode = settings.make(tokenizer)
  plain, locked = error_rates(settings)
  pieces, masks = [episode.begin(prompt)], [False]
  reward = None
  while reward is None:
    # Decide: by the sign with mistakes, out of a side room, or anything in a dead end.
    walk, key = episode.walk, prompt.data["key"]
    sign = prompt.data["doors"][walk.door]
    right = right_word(sign, key)
    if walk.room == "side":
      word = BACK
    elif walk.room == "dead" and settings.dead_ends == "marked":
      word = WORDS[rng.integers(len(WORDS))]
    else:
      wrong = rng.random() < (locked if sign in LOCKED else plain)
      word = mistaken(right, int(rng.integers(len(MISTAKES)))) if wrong else right
    if walk.room == "dead" and settings.dead_ends != "silent" and rng.random() < LEAVING:
      word = ""

    # Play it, behind pauses. The action is imitated, the observation is not.
    pauses = min(int(rng.geometric(1 - settings.pauses)) - 1, MAX_PAUSES) if word else 0
    action = tokenizer.encode_with_specials(f"{PAUSE * pauses}{word}<|end|>")
    result = episode.respond(action)
    reward = result.reward
    pieces += [action, result.observation]
    masks += [True, False]

  return Demonstration(
    np.concatenate(pieces).astype(np.int32),
    np.concatenate([np.full(len(piece), mask, dtype=bool) for piece, mask in zip(pieces, masks)]),
    reward,
  )


def mistaken(right: str, mistake: int) -> str:
  """Writes a wrong word, or none, by the number of a mistake."""
  return "" if MISTAKES[mistake] == "leave" else next_word(right, by=1 + mistake)


def states_of(
  settings: Corridor, token_ids: Int[np.ndarray, "T"], action_mask: Bool[np.ndarray, "T"]
) -> list[Hashable]:
  """Follows an episode by its tokens; returns the state before each sampled token.

  A state is (level, doors left, room, repairs left, "plain" or "locked", where a word that is said already leads).
  """
  tokenizer = settings.tokenizer()
  level, key = (chr(token_id) for token_id in token_ids[2:4])
  walk, states = Walk(0, "door", settings.num_repairs), []
  for shown, action in turns_of(token_ids, action_mask):
    sign = chr(shown[-1]) if walk.room == "door" else ""
    right = right_word(sign, key) if sign else ""
    kind = "locked" if sign in (*LOCKED,) else "plain"
    state = (level, settings.horizon - walk.door, walk.room, walk.repairs, kind)

    # A word may be said before the end of the turn, and then decides.
    said = tokenizer.encode_with_specials("<|end|>")[:0]
    for token_id in action:
      pausing = len(said) == 0 or not tokenizer.decode(said).strip(PAUSE)
      goes = None if pausing else walk.after(read_word(tokenizer, [*said, tokenizer.end_id]), right).room
      states.append((*state, goes))
      said = np.append(said, token_id)
    word = read_word(tokenizer, action)
    walk = walk.after(word, right) if word != "" else walk
  return states
