"""The tools of a coding agent: a shell, an editor of texts, and the end of the work."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from sao_jax.environments.tool_environment import ToolError
from sao_jax.sandbox.contract import CommandResult, FileRefused, Sandbox
from sao_jax.sandbox.supervisor import WORK

MAX_FILE = 4 * 2**20  # bytes that the editor takes
LOOK_TIMEOUT = 60.0  # seconds
AROUND = 4  # lines shown before and behind an edit
EXISTS = 'test -e "./$1" || test -L "./$1"'
LIST = 'cd "./$1" && find . -maxdepth 2 -not -path "*/.*" | LC_ALL=C sort | head -n 1000'

BASH = {
  "type": "function",
  "function": {
    "name": "bash",
    "description": (
      "Runs a command in a new bash in the repository's folder. Files stay from one call to the next; "
      "the folder and variables of the shell, and processes in the background, do not."
    ),
    "parameters": {
      "type": "object",
      "properties": {"command": {"type": "string", "description": "The command."}},
      "required": ["command"],
    },
  },
}
EDITOR = {
  "type": "function",
  "function": {
    "name": "str_replace_editor",
    "description": (
      "Views and edits files. view: shows a file with numbered lines, or lists a folder. create: writes a new file. "
      "str_replace: replaces old_str, which must be found exactly once, by new_str. "
      "insert: puts new_str behind the line insert_line, 0 for the beginning."
    ),
    "parameters": {
      "type": "object",
      "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        "path": {"type": "string", "description": "Absolute, or relative to the repository's folder."},
        "file_text": {"type": "string", "description": "Of create."},
        "old_str": {"type": "string", "description": "Of str_replace, with all its white space."},
        "new_str": {"type": "string", "description": "Of str_replace and insert."},
        "insert_line": {"type": "integer", "description": "Of insert."},
        "view_range": {
          "type": "array",
          "items": {"type": "integer"},
          "description": "Of view: the first line and the last one, -1 for the end.",
        },
      },
      "required": ["command", "path"],
    },
  },
}
SUBMIT = {
  "type": "function",
  "function": {
    "name": "submit",
    "description": "Ends the work: the repository is judged as it is.",
    "parameters": {"type": "object", "properties": {}},
  },
}
TOOLS = {"bash": BASH, "str_replace_editor": EDITOR, "submit": SUBMIT}


async def run_bash(sandbox: Sandbox, command: str, timeout: float, environment: Mapping[str, str]) -> str:
  """Runs a command in the work folder; returns all that it wrote, in order, and how it ended unless well."""
  words = ["sh", "-c", 'exec bash -c "$1" 2>&1', "sh", command]
  return show_end(await sandbox.run(words, timeout=timeout, environment=environment), timeout)


def show_end(result: CommandResult, timeout: float) -> str:
  """Writes the result of a command as the agent sees it."""
  said = (result.stdout + result.stderr).decode("utf-8", "replace").rstrip("\n")
  if result.killed_for:
    limit = f"after {timeout:g} s" if result.timed_out else f"for too much {result.killed_for}"
    end = f"[killed {limit}]"
  else:
    end = f"[exit status {result.exit_status}]" if result.exit_status else ""
  return "\n".join(part for part in (said, end) if part)


async def edit(sandbox: Sandbox, arguments: Mapping[str, Any]) -> str:
  """Performs one command of the editor; returns what the agent sees of it.

  Raises:
    ToolError: it cannot be done.
  """
  commands: dict[str, Callable[..., Any]] = {"view": _view, "create": _create, "str_replace": _replace}
  action = (commands | {"insert": _insert}).get(arguments["command"])
  if action is None:
    raise ToolError(f"Error: there is no command {arguments['command']!r:.80}")
  try:
    return await action(sandbox, _inside(arguments["path"]), arguments)
  except FileRefused as error:
    raise ToolError(f"Error: {error}") from error


async def _view(sandbox: Sandbox, path: str, arguments: Mapping[str, Any]) -> str:
  try:
    lines = (await _read(sandbox, path)).split("\n")
  except FileRefused as error:
    listed = await sandbox.run(["sh", "-c", LIST, "sh", path], timeout=LOOK_TIMEOUT)
    if listed.exit_status != 0 or not listed.stdout:
      raise error
    return listed.stdout.decode("utf-8", "replace").rstrip("\n")

  # Lines are counted from 1.
  asked = arguments.get("view_range") or [1, -1]
  if len(asked) != 2 or not all(isinstance(line, int) for line in asked):
    raise ToolError("Error: view_range is two numbers")
  first, last = asked[0], len(lines) if asked[1] == -1 else min(asked[1], len(lines))
  if not 1 <= first <= last:
    raise ToolError(f"Error: there are no lines {asked[0]} to {asked[1]}; the file has {len(lines)}")
  return _numbered(lines, first, last)


async def _create(sandbox: Sandbox, path: str, arguments: Mapping[str, Any]) -> str:
  text = _argument(arguments, "file_text")
  if (await sandbox.run(["sh", "-c", EXISTS, "sh", path], timeout=LOOK_TIMEOUT)).exit_status == 0:
    raise ToolError(f"Error: {path!r} is there already; edit it, or remove it first")
  await _write(sandbox, path, text)
  return f"{path} was created."


async def _replace(sandbox: Sandbox, path: str, arguments: Mapping[str, Any]) -> str:
  old, new = _argument(arguments, "old_str"), arguments.get("new_str") or ""
  text = await _read(sandbox, path)
  count = text.count(old) if old else 0
  if count != 1:
    found = f"is found {count} times; name more lines around it" if count else "is not found, exactly as it stands"
    raise ToolError(f"Error: old_str {found}")

  # The answer shows the place.
  before = text.partition(old)[0]
  await _write(sandbox, path, text.replace(old, new))
  first = before.count("\n") + 1
  return _edited(path, text.replace(old, new), first, first + new.count("\n"))


async def _insert(sandbox: Sandbox, path: str, arguments: Mapping[str, Any]) -> str:
  new, place = _argument(arguments, "new_str"), arguments.get("insert_line")
  text = await _read(sandbox, path)
  lines = text.splitlines(keepends=True)
  if not isinstance(place, int) or not 0 <= place <= len(lines):
    raise ToolError(f"Error: insert_line must be a number from 0 to {len(lines)}")
  if place and not lines[place - 1].endswith("\n"):
    lines[place - 1] += "\n"
  ended = new if new.endswith("\n") else f"{new}\n"
  text = "".join([*lines[:place], ended, *lines[place:]])
  await _write(sandbox, path, text)
  return _edited(path, text, place + 1, place + ended.count("\n"))


def _edited(path: str, text: str, first: int, last: int) -> str:
  """Shows the lines around an edit."""
  lines = text.split("\n")
  shown = _numbered(lines, max(1, first - AROUND), min(len(lines), last + AROUND))
  return f"{path} was edited:\n{shown}"


def _numbered(lines: list[str], first: int, last: int) -> str:
  """Writes lines with their numbers, as `cat -n` does."""
  return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines[first - 1 : last], first))


def _argument(arguments: Mapping[str, Any], name: str) -> str:
  if arguments.get(name) is None:
    raise ToolError(f"Error: {arguments['command']} needs {name}")
  return arguments[name]


def _inside(path: str) -> str:
  """Returns a path relative to the work folder."""
  whole = posixpath.normpath(posixpath.join(WORK, path))
  if whole != WORK and not whole.startswith(f"{WORK}/"):
    raise ToolError(f"Error: {path!r:.200} lies outside of {WORK}")
  return posixpath.relpath(whole, WORK)


async def _read(sandbox: Sandbox, path: str) -> str:
  try:
    return (await sandbox.read_file(path, MAX_FILE)).decode("utf-8")
  except UnicodeDecodeError as error:
    raise ToolError(f"Error: {shlex.quote(path)} is no text in UTF-8") from error


async def _write(sandbox: Sandbox, path: str, text: str) -> None:
  await sandbox.write_file(path, text.encode("utf-8", "replace"))
