"""A key-value store in memory, as jax's coordination service keeps one, for processes that are threads."""

from __future__ import annotations

import threading
import time

import jax


class SharedStore:
  """Counts what is asked, and keeps everything by key."""

  def __init__(self):
    self.entries: dict[str, str] = {}
    self._changed = threading.Condition()

  def key_value_set(self, key, value, allow_overwrite=False):
    with self._changed:
      if key in self.entries and not allow_overwrite:
        raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
      self.entries[key] = value
      self._changed.notify_all()

  def blocking_key_value_get(self, key, timeout_in_ms):
    deadline = time.monotonic() + timeout_in_ms / 1000
    with self._changed:
      if not self._changed.wait_for(lambda: key in self.entries, deadline - time.monotonic()):
        raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
      return self.entries[key]

  def key_value_dir_get(self, key):
    with self._changed:
      return [entry for entry in self.entries.items() if entry[0].startswith(key)]

  def key_value_delete(self, key):
    with self._changed:
      for name in [name for name in self.entries if name == key or (key.endswith("/") and name.startswith(key))]:
        del self.entries[name]


def together(store, count, *functions, **options):
  """Calls one function in each of `count` processes (the last one in all that are left); returns results or errors."""
  from sao_jax.parallel.agreement import Processes

  results = [None] * count

  def call(index):
    function = functions[min(index, len(functions) - 1)]
    try:
      results[index] = function(Processes(index, count, store, **options))
    except Exception as error:
      results[index] = error

  threads = [threading.Thread(target=call, args=(index,)) for index in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  return results
