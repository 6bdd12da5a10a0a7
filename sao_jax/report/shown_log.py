"""The log as people want it: how the work of this project goes on, and of the libraries below it what went wrong."""

from __future__ import annotations

import logging as python_logging
import re

from absl import logging

_LIBRARY = re.compile(r"[/\\](orbax|gcsfs|fsspec|grain|jax|tensorflow_datasets|etils|matplotlib)[/\\]")


def show_log() -> None:
  """Shows what is logged while something runs, as progress is: in a notebook nothing is shown otherwise."""
  logging.set_verbosity(logging.INFO)
  only_what_matters()


def only_what_matters() -> None:
  """Keeps away what libraries tell of their own work."""
  logging.get_absl_handler().addFilter(is_told)


def is_told(record: python_logging.LogRecord) -> bool:
  """A filter of log records; of what went wrong within a library it keeps the message without the traceback.

  A checkpoint on a full disk fails in many of Orbax's tasks at once: their tracebacks are thousands of lines, between
  which nobody finds ours.
  """
  if _LIBRARY.search(record.pathname):
    if record.levelno < python_logging.WARNING:
      return False
    record.exc_info = record.exc_text = record.stack_info = None
  return record.name != "asyncio" or not _LIBRARY.search(record.getMessage())
