"""Games of the textarena package by their ids; those that cannot be played here are refused with a remedy."""

from __future__ import annotations

import difflib
import importlib.util
import os
import pathlib
from typing import Any

from sao_jax.errors import ConfigError

# Sets of words that games look up: what their source mentions, where nltk keeps it, its name for nltk's downloader.
WORD_SETS = (
  (("nltk", "EnglishDictionary"), "corpora/words", "words"),
  (("pos_tag",), "taggers/averaged_perceptron_tagger_eng", "averaged_perceptron_tagger_eng"),
)


def load_game(game: str, nltk_folder: str = "") -> Any:
  """Makes the game of an id, with the wrappers that textarena gives it.

  Args:
    game: textarena's id, such as "GuessTheNumber-v0".
    nltk_folder: where the sets of words lie that some games look up; "": where nltk looks itself.

  Raises:
    ConfigError: the package is missing, there is no such game, or it cannot be played on this machine.
  """
  try:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY
  except ImportError as error:
    problem = f"The package textarena is not installed ({error})."
    raise ConfigError("environment", problem, "Run: pip install -e '.[textarena]'") from error

  if game not in ENV_REGISTRY:
    matches = difflib.get_close_matches(game, ENV_REGISTRY, n=3, cutoff=0.5)
    remedy = f"Did you mean {', '.join(matches)}?" if matches else "textarena.pprint_registry_detailed() shows them."
    raise ConfigError("environment.game", f"textarena has no game {game!r}.", remedy)
  _check_needs(game, _source(ENV_REGISTRY[game].entry_point), nltk_folder)

  # A game may need a newer Python, another package, or a file that the installed package has left out.
  try:
    return textarena.make(game)
  except Exception as error:
    problem = f"textarena cannot make {game!r}: {type(error).__name__}: {str(error).strip()[:200]}"
    raise ConfigError("environment.game", problem, "Choose another game, or install what it needs.") from error


def _source(entry_point: Any) -> str:
  """Reads the source of a game without importing it: at import, some games download."""
  if not isinstance(entry_point, str):
    return ""  # registered by the user as a class
  spec = importlib.util.find_spec(entry_point.partition(":")[0])
  return pathlib.Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""


def _check_needs(game: str, source: str, nltk_folder: str) -> None:
  """Refuses a game that would ask the network for words that are not here, or for a language model's opinion."""
  if "OpenRouterAgent" in source:
    problem = f"{game!r} asks a language model on the network about every move."
    raise ConfigError("environment.game", problem, "Choose a game that has rules of its own.")
  needed = [(place, name) for words, place, name in WORD_SETS if any(word in source for word in words)]
  if not needed:
    return

  import nltk

  if nltk_folder and not os.path.isdir(nltk_folder):
    raise ConfigError("environment.nltk_folder", f"There is no folder {nltk_folder!r}.", "Correct the path.")
  if nltk_folder and nltk_folder not in nltk.data.path:
    nltk.data.path.insert(0, nltk_folder)

  # Nothing is fetched by us: who runs this may have no network, or not want it.
  missing = [name for place, name in needed if not _has(place)]
  if missing:
    remedy = (
      f"Run `python -m nltk.downloader -d FOLDER {' '.join(missing)}` where there is a network, copy FOLDER here, "
      "and name it in environment.nltk_folder."
    )
    problem = f"{game!r} needs nltk's {' and '.join(missing)}, which this machine does not have."
    raise ConfigError("environment.nltk_folder", problem, remedy)


def _has(place: str) -> bool:
  """Tells whether nltk finds a set of words, in a folder or packed."""
  import nltk

  for form in (place, f"{place}.zip"):
    try:
      nltk.data.find(form)
      return True
    except LookupError:
      continue
  return False
