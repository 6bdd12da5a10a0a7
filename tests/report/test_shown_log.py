"""The log tells how this project's work goes on, and of the libraries below it what went wrong."""

from __future__ import annotations

import logging

import pytest
from absl import logging as absl_logging

from sao_jax.report.shown_log import is_told, show_log


@pytest.fixture
def handler():
  """The handler of the log, as it was before."""
  handler, verbosity = absl_logging.get_absl_handler(), absl_logging.get_verbosity()
  filters = list(handler.filters)
  yield handler
  handler.filters[:] = filters
  absl_logging.set_verbosity(verbosity)


def test_a_log_that_is_shown_twice_has_one_filter(handler):
  handler.filters.clear()
  absl_logging.set_verbosity(absl_logging.WARNING)
  show_log()
  show_log()
  assert handler.filters == [is_told]
  assert absl_logging.get_verbosity() == absl_logging.INFO


def test_the_log_keeps_what_libraries_complain_of_but_not_their_tracebacks():
  def told(path, level, name="absl", message="problem"):
    record = logging.LogRecord(name, level, path, 1, message, (), (OSError, OSError("full"), None))
    return is_told(record) and (record.exc_info is not None)

  orbax, gcsfs = "/packages/orbax/checkpoint/future.py", "/packages/gcsfs/caching.py"
  assert not is_told(logging.LogRecord("gcsfs", logging.INFO, gcsfs, 1, "a cache", (), None))
  assert told(orbax, logging.ERROR) is False and told("/sao_jax/training/loop.py", logging.ERROR) is True
  record = logging.LogRecord("absl", logging.ERROR, orbax, 1, "not written", (), None)
  assert is_told(record)
  assert not is_told(logging.LogRecord("absl", logging.INFO, orbax, 1, "saving", (), None))
  assert not is_told(logging.LogRecord("x", logging.INFO, "/packages/matplotlib/category.py", 1, "", (), None))
  lost = f"Task exception was never retrieved, defined at {orbax}"
  assert not is_told(logging.LogRecord("asyncio", logging.ERROR, "/lib/asyncio/base_events.py", 1, lost, (), None))
