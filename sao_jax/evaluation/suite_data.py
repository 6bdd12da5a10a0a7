"""The files of a published benchmark, as they were downloaded: found, recognised by their fields, and counted."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re

from absl import logging

from sao_jax.data.places import open_file, place_of
from sao_jax.data.records import RecordPrompts
from sao_jax.episode import BadPrompt
from sao_jax.errors import ConfigError
from sao_jax.evaluation.suite import Layout, Suite

HUB = "hf:"  # before the name of a data set on huggingface.co


@dataclasses.dataclass(frozen=True)
class SuiteData:
  """The problems of a suite, for `RecordPrompts`.

  Attributes:
    path: a file, or the folder of several.
    split: the beginning of their names; "" for one file.
    layout: the form that they have.
    files: all of them.
    count: their records.
  """

  path: str
  split: str
  layout: Layout
  files: tuple[str, ...]
  count: int

  def digest(self) -> str:
    """Names the content of the files: the same wherever they lie."""
    found = hashlib.sha256()
    for file in self.files:
      with open_file(file) as opened:
        while block := opened.read(2**20):
          found.update(block)
    return found.hexdigest()


def find_data(suite: Suite, path: str) -> SuiteData:
  """Finds the problems of a suite.

  Args:
    suite: the benchmark.
    path: a file of it, or the folder to which it was downloaded; gs:// for one in a bucket.

  Raises:
    ConfigError: they are not there, which says where they are published, or they have other fields.
  """
  if not path:
    raise ConfigError("--suite_data", f"it is missing: the files of {suite.title}.", _where(suite))
  place = place_of(path)
  if place.is_file():
    data = _recognised(suite, os.fspath(place), "", (os.fspath(place),), suite.layouts)
  else:
    data = _in_folder(suite, path)

  # Half of a benchmark, or an older version of it, gives another number under the same name.
  if data.count != suite.problems:
    logging.warning("%s has %d problems, and %s has %d.", suite.title, suite.problems, path, data.count)
  return data


def has_fields(data: SuiteData, *names: str) -> bool:
  """Tells if the first record has all of these fields."""
  try:
    RecordPrompts(data.path, environment="", fields={name: name for name in names}, split=data.split)[0]
  except ConfigError:
    return False
  return True


def _in_folder(suite: Suite, path: str) -> SuiteData:
  """Finds the files of the first layout that the folder has."""
  place = place_of(path)
  for layout in suite.layouts if place.is_dir() else ():
    files = sorted(os.fspath(file) for file in place.glob(layout.files))
    if len(files) == 1:
      return _recognised(suite, files[0], "", (files[0],), (layout,))
    if files:
      folder, name = os.path.split(files[0])
      return _recognised(suite, folder, re.split(r"[-._]", name)[0], tuple(files), (layout,))
  wanted = " or ".join(dict.fromkeys(layout.files for layout in suite.layouts))
  problem = f"has no {wanted}" if place.is_dir() else "is not there"
  raise ConfigError("--suite_data", f"{path} {problem}, the files of {suite.title}.", _where(suite))


def _recognised(suite: Suite, path: str, split: str, files: tuple[str, ...], layouts: tuple[Layout, ...]) -> SuiteData:
  """Chooses the layout whose fields the records have, and counts them."""
  problem: ConfigError | None = None
  for question, answer in dict.fromkeys((layout.question, layout.answer) for layout in layouts):
    try:
      records = RecordPrompts(path, environment=suite.name, fields={"q": question, "a": answer}, split=split)
      if len(records):
        records[0]
    except ConfigError as error:  # also the BadPrompt of a first record without these fields
      problem = error
      continue
    if not len(records):
      break
    return SuiteData(path, split, Layout("", question, answer), files, len(records))

  fields = " or ".join(dict.fromkeys(f"{layout.question!r} and {layout.answer!r}" for layout in layouts))
  remedy = problem.remedy if problem is not None and not isinstance(problem, BadPrompt) else _where(suite)
  found = f" ({problem.problem})" if problem is not None else ""
  raise ConfigError("--suite_data", f"{path} has no records with {fields}, as {suite.title} has{found}.", remedy)


def _where(suite: Suite) -> str:
  """Tells where a suite is published, and what to do with it."""
  first, *others = suite.published
  also = f" (the same problems: {', '.join(others)})" if others else ""
  if not first.startswith(HUB):
    return f"Download {first}{also}, and pass --suite_data=FILE."
  name = first.removeprefix(HUB)
  command = f"hf download --repo-type=dataset {name} --local-dir=DIR"
  return f"It is published at https://huggingface.co/datasets/{name}{also}: {command}, and pass --suite_data=DIR."
