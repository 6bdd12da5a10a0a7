"""Games of the real textarena package: alone and against others, whole episodes, and what cannot be played."""

from __future__ import annotations

import json
import pickle
import random
import re
import threading

import numpy as np
import pytest
from toys import chat_toy
from toys.scripted_policy import WIDE, play

from sao_jax.data.prompts import split_of
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments import game_table
from sao_jax.environments.game_table import GameTable
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.environments.text_game import TextGame
from sao_jax.environments.textarena_games import load_game
from sao_jax.episode import EnvironmentFailure, InfrastructureFailure, Status
from sao_jax.errors import ConfigError
from sao_jax.rollout.run_episode import EpisodeLimits

pytest.importorskip("textarena", reason="the extra `textarena` is not installed")

GUESS = TextGame("GuessTheNumber-v0", num_prompts=4)
CROSS = TextGame("TicTacToe-v0", players=2, num_prompts=4)


def bisection():
  """A player that halves what is left."""
  low, high, last = 1, 20, None

  def guess(text: str) -> str:
    nonlocal low, high, last
    low = last + 1 if "higher" in text and last else low
    high = last - 1 if "lower" in text and last else high
    last = (low + high) // 2
    return f"<think>perhaps [1]</think>I say [{last}]"

  return guess


def first_free(text: str) -> str:
  """Takes the first square that the board still offers."""
  return re.findall(r"'\[(\d)\]'", text.rpartition("Available Moves")[2])[0]


def take_first_free(told: str, rng: random.Random) -> str:
  return f"[{first_free(told)}]"


def play_nonsense(told: str, rng: random.Random) -> str:
  return "[99]"


def break_down(told: str, rng: random.Random) -> str:
  raise ValueError("no idea")


def first(settings: TextGame, split: str = "train"):
  return settings.prompts(settings.tokenizer(), split, 0)[0]


def test_a_number_is_found_by_halving_what_is_left():
  trajectory = play(GUESS, first(GUESS), bisection())
  assert (trajectory.status, trajectory.reward) == (Status.TERMINATED, 1.0)
  assert trajectory.info["invalid_moves"] == 0.0 and trajectory.info["game_turns"] == len(trajectory.turn_starts) <= 5
  text = ByteTokenizer().decode(trajectory.token_ids)
  assert "between 1 and 20" in text and text.count("<|bos|>") == 1 and text.count("The target number") >= 1
  assert "perhaps" in text  # thinking was kept in the episode, and was no move: [1] was never guessed


def test_moves_that_are_none_are_counted_and_lose_the_game():
  trajectory = play(GUESS, first(GUESS), lambda text: "no idea")
  assert trajectory.status is Status.TERMINATED and trajectory.info["invalid_moves"] == 2.0
  assert trajectory.reward == 0.0  # the game's own: nothing was guessed
  assert "invalid move" in ByteTokenizer().decode(trajectory.token_ids)


def test_a_game_that_a_limit_cuts_has_the_reward_of_the_settings():
  limits = EpisodeLimits(1, *[getattr(WIDE, name) for name in list(WIDE.__dataclass_fields__)[1:]])
  assert play(GUESS, first(GUESS), lambda text: "[99]", limits=limits).reward == 0.0
  against = play(CROSS, first(CROSS), first_free, limits=limits)
  assert (against.status, against.reward) == (Status.TRUNCATED_TURNS, -1.0)
  settings = TextGame("GuessTheNumber-v0", num_prompts=1, unfinished_reward=0.25)
  assert play(settings, first(settings), lambda text: "[99]", limits=limits).reward == 0.25


def test_a_game_against_a_random_player_is_the_same_again_for_a_prompt():
  seen = []
  for prompt in CROSS.prompts(CROSS.tokenizer(), "train", 0):
    once, again = (play(CROSS, prompt, first_free) for _ in range(2))
    assert once.token_ids.tolist() == again.token_ids.tolist() and once.reward == again.reward
    assert once.reward in (-1.0, 0.0, 1.0) and once.info["won"] == (once.reward == 1.0)
    assert once.info["drawn"] == (once.reward == 0.0) and once.info["opponent_invalid_moves"] == 0.0
    text = ByteTokenizer().decode(once.token_ids)
    seat = prompt.data["seat"]
    assert f"You are Player {seat} in Tic Tac Toe" in text
    assert (f"Player {1 - seat} placed" in text.partition("<|assistant|>")[0]) == (seat == 1)
    seen.append(text)
  assert len(set(seen)) >= 3 and {prompt.data["seat"] for prompt in CROSS.prompts(None, "train", 0)} == {0, 1}


def test_a_function_plays_the_other_seat():
  # The first three squares in a row are taken by whoever begins, if the other one plays elsewhere: nobody does here.
  settings = TextGame("TicTacToe-v0", players=2, seat=0, opponent=f"{__name__}:take_first_free", num_prompts=1)
  trajectory = play(settings, first(settings), first_free)
  assert trajectory.reward == 1.0 and trajectory.info["won"] == 1.0  # 0, 2, 4, 6 is a line
  nonsense = TextGame("TicTacToe-v0", players=2, opponent=f"{__name__}:play_nonsense", num_prompts=1)
  trajectory = play(nonsense, first(nonsense), first_free)
  assert trajectory.reward == 1.0 and trajectory.info["opponent_invalid_moves"] == 2.0  # won, and it shows how
  broken = TextGame("TicTacToe-v0", players=2, opponent=f"{__name__}:break_down", num_prompts=1)
  with pytest.raises(EnvironmentFailure, match="ValueError: no idea"):
    play(broken, first(broken), first_free)


def test_random_players_find_legal_moves_in_games_of_several_kinds():
  for game in ("ConnectFour-v0", "KuhnPoker-v0", "IteratedRockPaperScissors-v0", "Nim-v0", "SimpleTak-v0"):
    table = GameTable(load_game(game), name="x", players=2, seat=1, seed=3, opponent=None)
    view, told, errors = table.begin(), "", 0
    while not view.done:
      told += view.text
      view = table.move(table._random_move(told))
      errors += view.invalid
    assert errors == table.opponent_errors == 0 and set(table.result()) == {0, 1}


def test_a_game_leaves_the_generators_of_the_process_alone():
  random.seed(5)
  np.random.seed(5)
  expected = random.Random(5).random(), np.random.RandomState(5).rand()
  play(CROSS, first(CROSS), first_free)
  assert (random.random(), np.random.rand()) == expected


def test_two_games_at_once_do_not_disturb_each_other(monkeypatch):
  alone = [play(CROSS, prompt, first_free).token_ids.tolist() for prompt in CROSS.prompts(None, "train", 0)]
  together = [None] * 4

  def run(index):
    together[index] = play(CROSS, CROSS.prompts(None, "train", 0)[index], first_free).token_ids.tolist()

  threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert together == alone

  # A game that never comes back does not hold up the others for ever, and is not their loss.
  prompt = first(GUESS)
  monkeypatch.setattr(game_table, "MAX_WAIT", 0.01)
  with game_table._computing, pytest.raises(InfrastructureFailure, match="another game"):
    play(GUESS, prompt, bisection())


def test_splits_hold_other_seeds_for_ever():
  prompts = {split: GUESS.prompts(None, split, 0) for split in ("train", "heldout")}
  for split, each in prompts.items():
    assert len(each) == 4 and all(split_of(f"GuessTheNumber-v0 {prompt.data['seed']}") == split for prompt in each)
    assert each == GUESS.prompts(None, split, 7) and json.loads(json.dumps(each[0].data)) == each[0].data
  assert not {p.data["seed"] for p in prompts["train"]} & {p.data["seed"] for p in prompts["heldout"]}
  assert pickle.loads(pickle.dumps(GUESS)) == GUESS


def test_long_observations_lose_their_middle():
  settings = TextGame("LogicPuzzle-v0", num_prompts=1, max_observation_tokens=200)
  trajectory = play(settings, first(settings), lambda text: "?")
  prompt = ByteTokenizer().decode(trajectory.token_ids[: trajectory.turn_starts[0]])
  assert "tokens left out" in prompt and trajectory.turn_starts[0] < 220


def test_games_speak_through_a_chat_template(tmp_path):
  pytest.importorskip("tokenizers", reason="the extra `hf` is not installed")
  pytest.importorskip("jinja2", reason="the extra `hf` is not installed")
  folder = str(chat_toy.save_folder(tmp_path))
  settings = TextGame("GuessTheNumber-v0", num_prompts=1, tokenizer_folder=folder, system_prompt="Play well.")
  trajectory = play(settings, first(settings), bisection())
  text = settings.tokenizer().decode(trajectory.token_ids)
  assert trajectory.reward == 1.0 and text.startswith("<|im_start|>system\nPlay well.<|im_end|>")


def test_games_of_a_mixture_keep_their_names_and_scales():
  mixture = Mixture((Part(GUESS), Part(CROSS.__class__("TicTacToe-v0", name="cross", players=2), reward_scale=0.5)))
  prompts = mixture.prompts(mixture.tokenizer(), "train", 0)
  prompt = next(prompts[i] for i in range(len(prompts)) if prompts[i].key.environment == "cross")
  trajectory = play(mixture, prompt, first_free)
  assert trajectory.key.environment == "cross" and trajectory.reward in (-0.5, 0.0, 0.5)


@pytest.mark.parametrize(
  "game, options, problem",
  [
    ("GuessTheNumbr-v0", {}, "Did you mean GuessTheNumber-v0"),
    ("Hangman-v0", {}, "python -m nltk.downloader -d FOLDER words"),
    ("Hangman-v0", {"nltk_folder": "/nowhere"}, "There is no folder"),
    ("TwentyQuestions-v0", {}, "asks a language model"),
    ("TicTacToe-v0", {}, "does not begin with 1 players"),
    ("ScorableGames-v0", {"players": 2}, "does not begin with 2 players: FileNotFoundError"),
  ],
)
def test_games_that_cannot_be_played_here_are_refused_before_work_starts(game, options, problem, monkeypatch):
  import nltk

  monkeypatch.setattr(nltk.data, "path", [])
  with pytest.raises(ConfigError, match=problem) as refused:
    TextGame(game, **options).prompts(ByteTokenizer(), "train", 0)
  # One field is to blame, with one remedy.
  assert ("players" in refused.value.field) == ("does not begin" in problem) and str(refused.value).count(
    "remedy:"
  ) == 1


@pytest.mark.parametrize(
  "options, field",
  [
    ({"players": 0}, "players"),
    ({"seat": 1}, "seat"),
    ({"num_prompts": 0}, "num_prompts"),
    ({"max_observation_tokens": 8}, "max_observation_tokens"),
    ({"unfinished_reward": float("nan")}, "unfinished_reward"),
    ({"threads": 0}, "threads"),
    ({"opponent": "clever"}, "opponent"),
    ({"opponent": "math:pi"}, "opponent"),
  ],
)
def test_settings_that_cannot_work_are_refused(options, field):
  with pytest.raises(ConfigError, match=f"environment.{field}"):
    TextGame("GuessTheNumber-v0", **options)
