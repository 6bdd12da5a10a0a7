"""Jinja chat templates of Hugging Face folders: messages and tools in, the text of the conversation out."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sao_jax.chat.tokenizer_files import read_json
from sao_jax.errors import ConfigError

REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that messages use
Message = Mapping[str, Any]  # "role", "content", and other keys that the template reads; JSON values


def load_templates(folder: pathlib.Path) -> dict[str, str]:
  """Reads the templates of a folder as name -> source; the main one is called "default".

  Files (chat_template.jinja, additional_chat_templates/NAME.jinja) come before `chat_template` of
  tokenizer_config.json, which is one source or a list of {"name": ..., "template": ...}.

  Raises:
    ConfigError: when there is none.
  """
  main, others = folder / "chat_template.jinja", sorted((folder / "additional_chat_templates").glob("*.jinja"))
  templates = {"default": main.read_text(encoding="utf-8")} if main.is_file() else {}
  templates |= {path.name.removesuffix(".jinja"): path.read_text(encoding="utf-8") for path in others}
  if templates:
    return templates
  declared = read_json(folder / "tokenizer_config.json").get("chat_template")
  if isinstance(declared, str):
    return {"default": declared}
  if isinstance(declared, list) and declared:
    return {entry["name"]: entry["template"] for entry in declared}
  raise ConfigError(
    "tokenizer", f"{folder} has no chat template.", "Use an instruct model's folder, or add a chat_template.jinja."
  )


class ChatTemplate:
  """The compiled templates of one folder, rendered in a sandbox as transformers does. Safe to share by threads."""

  def __init__(self, folder: pathlib.Path, variables: Mapping[str, Any]):
    """Compiles the templates of a folder.

    Args:
      folder: a Hugging Face folder, read by `load_templates`.
      variables: values that templates may read besides the conversation: token names and options such as
        `enable_thinking`.

    Raises:
      ConfigError: when the package jinja2 is missing, there is no template, or one has a syntax error.
    """
    self.name = f"the chat template of {folder}"
    self._variables = dict(variables)
    environment, self._error = _sandbox()
    self._compiled = {}
    for name, source in load_templates(folder).items():
      try:
        self._compiled[name] = environment.from_string(source)
      except self._error as error:
        raise ConfigError("chat_template", f"{self.name} ({name}) is no Jinja: {error}", "Correct it.") from error

  def render(
    self,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    now: datetime.datetime,
    documents: Sequence[Mapping[str, Any]] | None = None,
  ) -> str:
    """Renders the conversation as text. Keys of messages whose value is None are left out.

    Args:
      messages: the messages of the conversation, at least one.
      tools: JSON schemas of the tools; a template called "tool_use" is for conversations with tools.
      add_generation_prompt: True to end with the start of the assistant's turn.
      now: the time for templates that print the date.
      documents: texts to answer from, for templates that know of them.

    Raises:
      ConfigError: when the template refuses the conversation, or there is no template for it.
    """
    if not messages:
      raise ConfigError("messages", "A conversation has no message.", "Begin it with a system's or a user's.")
    name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
    if name not in self._compiled:
      known = sorted(self._compiled)
      raise ConfigError("chat_template", f"{self.name} has only {known}.", "Give it one called 'default'.")

    # Templates ask whether a message has a key, so keys without a value must not be there.
    known_only = [_with_reasoning({k: v for k, v in message.items() if v is not None}) for message in messages]

    # The variables are those that transformers gives to a template.
    try:
      return self._compiled[name].render(
        **{
          **self._variables,
          "messages": known_only,
          "tools": list(tools) if tools is not None else None,
          "documents": list(documents) if documents is not None else None,
          "add_generation_prompt": add_generation_prompt,
          "strftime_now": now.strftime,
        }
      )
    except (self._error, TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
      # A template is a program: it may refuse the messages, or fail on them in any of these ways.
      roles = [message.get("role") for message in known_only]
      raise ConfigError(
        "chat_template",
        f"{self.name} refuses a conversation of {roles}: {type(error).__name__}: {error}",
        "Send the roles and fields that it expects, or correct the template.",
      ) from error


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
  """Gives a message its reasoning under the names that templates read: `reasoning_content`, or `thinking`."""
  reasoning = next((message[name] for name in REASONING if name in message), None)
  return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _sandbox() -> tuple[Any, type[Exception]]:
  """Makes the Jinja environment for which published templates are written; returns it and Jinja's error class."""
  try:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
  except ImportError as error:
    raise ConfigError(
      "chat_template", f"The package jinja2 is not installed ({error}).", "Run: pip install -e '.[hf]'"
    ) from error

  class Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, a mark around the assistant's text for other programs: here its content alone."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      return jinja2.nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)  # with its own scope

    def content(self, caller: Callable[[], str]) -> str:
      return caller()

  # Jinja's own filter escapes HTML; templates expect plain JSON, with the arguments of `json.dumps`.
  def tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  def make_dict(*pairs: Any, **values: Any) -> dict[str, Any]:
    return dict(*pairs, **values)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  # A namespace keeps no name that Python itself uses, and `dict` is a function, so that no template reaches a class.
  class Namespace(jinja2.utils.Namespace):
    def __init__(*args: Any, **values: Any):
      self, *args = args
      jinja2.utils.Namespace.__init__(self)
      for name, value in dict(*args, **values).items():
        self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
      if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")
      super().__setitem__(name, value)

  # A template comes with downloaded weights, so it runs in a sandbox; the options are those of transformers.
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
  )
  environment.filters["tojson"] = tojson
  environment.globals |= {
    "raise_exception": raise_exception,
    "namespace": Namespace,
    "dict": lambda *a, **k: dict(*a, **k),
  }
  return environment, jinja2.TemplateError
