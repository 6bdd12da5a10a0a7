"""Keeps the text of messages apart from the text of a chat template, through a rendering that mixes both."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.errors import ConfigError

# Markup that assistants write and templates look for in their turns, even where a tokenizer calls the tokens special.
TURN_MARKUP = frozenset(
  f"<{slash}{name}>" for name in ("think", "tool_call", "arg_key", "arg_value") for slash in ("", "/")
)


class Quotes:
  """Stand-ins for the names of control tokens inside messages, and for a turn, so that its place can be found again.

  A stand-in is made of lower-case letters and digits that nobody can guess, so that it passes unchanged through JSON,
  stripping and splitting, and no message can contain it.
  """

  def __init__(self, control_names: Sequence[str], turn_markup: frozenset[str] = TURN_MARKUP):
    """Makes stand-ins for `control_names`; assistants may write those in `turn_markup`, and mean the tokens."""
    nonce = secrets.token_hex(12)
    self._nonce = nonce
    self._names = {f"{nonce}x{number}x": name for number, name in enumerate(control_names)}
    self._stand_ins = {name: stand_in for stand_in, name in self._names.items()}
    self._hidden = _any_of(control_names)
    self._hidden_in_turns = _any_of([name for name in control_names if name not in turn_markup])
    self._shown = re.compile(f"{nonce}x[0-9]+x")
    self.turn = f"{nonce}turn"  # the stand-in for the whole text of a turn

  def hide(self, value: Any) -> Any:
    """Puts stand-ins into all strings of a JSON value; tuples become lists.

    Raises:
      ConfigError: for values that JSON does not have.
    """
    if isinstance(value, str):
      return self._hidden.sub(lambda match: self._stand_ins[match.group()], value)
    if value is None or isinstance(value, bool | int | float):
      return value
    if isinstance(value, Mapping):
      return {self.hide(key): self.hide(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [self.hide(item) for item in value]
    raise ConfigError(
      "messages", f"A message holds a {type(value).__name__}.", "Use texts, numbers, booleans, None, lists and dicts."
    )

  def hide_turn(self, text: str) -> str:
    """Puts stand-ins into an assistant's turn, for all control tokens but the markup that assistants write."""
    return self._hidden_in_turns.sub(lambda match: self._stand_ins[match.group()], text)

  def reveal(self, text: str) -> str:
    """Puts the names of control tokens back into the text.

    Raises:
      ConfigError: when the template changed a stand-in, as `upper` does.
    """
    shown = self._shown.sub(lambda match: self._names[match.group()], text)
    if self._nonce in shown.lower():
      raise ConfigError(
        "chat_template",
        "The template changes the text of messages in which names of control tokens stand.",
        "Use a template that shows the content of messages verbatim.",
      )
    return shown


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
  longest_first = sorted(names, key=len, reverse=True)
  return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
