"""Settings that open things when they are first asked for, and leave them behind when they go to another process."""

from __future__ import annotations

import dataclasses
from typing import Any


class Reopened:
  """Base of frozen dataclasses with cached properties (pools, servers, tokenizers): a copy has the fields alone.

  >>> import copy, functools
  >>> @dataclasses.dataclass(frozen=True)
  ... class Data(Reopened):
  ...   path: str
  ...
  ...   @functools.cached_property
  ...   def opened(self):
  ...     return object()
  >>> data = Data("questions.jsonl")
  >>> copy.copy(data).opened is data.opened, copy.copy(data) == data
  (False, True)
  """

  def __getstate__(self) -> dict[str, Any]:
    """Leaves out what was opened: the copy opens it again."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
