"""Texts of an OpenEnv environment: actions read from what a policy said, observations written for it to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sao_jax.rewards.named_function import named_function

ReadAction = Callable[[str, Mapping[str, Any]], dict[str, Any]]  # (what was said, schema) -> the action's fields
ShowObservation = Callable[[Mapping[str, Any]], str]
HIDDEN = ("metadata", "title", "description")  # of a schema, which says the rest


class NoAction(Exception):
  """No action could be read in what was said: the policy's own fault, and told to it."""


def action_reader(action: str, field: str) -> ReadAction:
  """Returns the function that reads actions.

  Args:
    action: "" for a JSON object, the name of the one field that all that is said is the value of, or
      "module:function": (what was said) -> fields, which raises ValueError where there is no action.
    field: of the configuration, for errors.

  Raises:
    ConfigError: there is no such function.
  """
  if not action:
    return _read_json
  if ":" not in action:
    return lambda said, schema: {action: _value(said.strip(), action, schema)}

  # A function of the user: that it finds no action is the policy's fault, all else that it raises is its own.
  function = named_function(action, field)

  def read(said: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    try:
      fields = function(said)
    except ValueError as error:
      raise NoAction(str(error) or "it holds no action") from error
    if not isinstance(fields, dict):
      raise TypeError(f"{action} returned {fields!r:.80}, which is no dictionary")
    return fields

  return read


def observation_writer(observation: str, field: str) -> ShowObservation:
  """Returns the function that writes observations.

  Args:
    observation: "" for all fields, as JSON unless there is only one text; the name of one field; or
      "module:function": (fields) -> text.
    field: of the configuration, for errors.

  Raises:
    ConfigError: there is no such function.
  """
  if ":" in observation:
    return named_function(observation, field)
  if not observation:
    return _show_all
  return lambda fields: _text(fields[observation])


def action_instruction(schema: Mapping[str, Any]) -> str:
  """Writes the system's message for actions that are JSON objects.

  >>> action_instruction({"properties": {"metadata": {}, "guess": {"title": "Guess", "type": "integer"}}})
  'Answer with one JSON object with these fields, and nothing else: {"guess": {"type": "integer"}}'
  """
  fields = json.dumps(_plain(schema.get("properties") or {}), ensure_ascii=False)
  return f"Answer with one JSON object with these fields, and nothing else: {fields}"


def check_fields(action: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
  """Compares an action's fields with the schema; what a field holds is the server's to check.

  Raises:
    NoAction: one is missing, or unknown.
  """
  known = schema.get("properties")
  if not isinstance(known, Mapping):
    return
  missing = sorted(set(schema.get("required") or ()) - action.keys())
  unknown = [] if schema.get("additionalProperties", False) else sorted(action.keys() - known.keys())
  if missing:
    raise NoAction(f"the field {missing[0]!r} is missing")
  if unknown:
    raise NoAction(f"there is no field {unknown[0]!r}")


def _read_json(said: str, schema: Mapping[str, Any]) -> dict[str, Any]:
  """Reads the JSON object that begins at the first brace of a text."""
  start = said.find("{")
  if start < 0:
    raise NoAction("it holds no JSON object")
  try:
    value, _ = json.JSONDecoder().raw_decode(said, start)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
  except (ValueError, RecursionError) as error:
    raise NoAction(f"it holds no valid JSON object ({error})") from error
  return value


def _value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
  """Reads the value of a field as its type: texts as they are, all else as JSON."""
  declared = (schema.get("properties") or {}).get(name)
  kind = declared.get("type") if isinstance(declared, Mapping) else None
  if kind in (None, "string"):
    return text
  try:
    value = json.loads(text)
    json.dumps(value, allow_nan=False)  # NaN and Infinity are no JSON, though Python reads them
  except (ValueError, RecursionError) as error:
    raise NoAction(f"it is no {kind}") from error
  return value


def _show_all(fields: Mapping[str, Any]) -> str:
  values = [*fields.values()]
  return values[0] if len(values) == 1 and isinstance(values[0], str) else _text(fields)


def _text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(schema: Any) -> Any:
  if isinstance(schema, list):
    return [_plain(each) for each in schema]
  if not isinstance(schema, Mapping):
    return schema
  return {name: _plain(value) for name, value in schema.items() if name not in HIDDEN}
