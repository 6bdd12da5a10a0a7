"""Records of repository tasks, with the field names of SWE-bench."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from sao_jax.environments.control_tests import path_of
from sao_jax.episode import BadPrompt

TOUCHED = re.compile(
  r"^(?:diff --git a/(?P<old>.+) b/(?P<new>.+)|(?:---|\+\+\+) [ab]/(?P<path>[^\t\n]+))", re.MULTILINE
)

SWEBENCH = "swebench"  # in the place of a field: the images that SWE-bench publishes


@dataclasses.dataclass(frozen=True)
class RepositoryRecord:
  """One task.

  Attributes:
    instance_id: its name.
    problem_statement: the text that the agent is given.
    base_commit: the commit that it starts from, of a snapshot that has several.
    test_patch: brings the hidden tests, as a diff on the base commit; may be empty.
    fail_to_pass: ids of tests that fail before the problem is solved, and must pass.
    pass_to_pass: ids of tests that pass before it, and must go on.
    snapshot: see `read_snapshot`; None with an image.
    image: name of a docker image that has the repository; "" with a snapshot.
    patch: the solution that is known, "" if none is.
  """

  instance_id: str
  problem_statement: str
  base_commit: str
  test_patch: str
  fail_to_pass: tuple[str, ...]
  pass_to_pass: tuple[str, ...]
  snapshot: Any = None
  image: str = ""
  patch: str = ""

  @property
  def tests(self) -> tuple[str, ...]:
    """The ids of all tests, without repetition."""
    return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

  @property
  def test_files(self) -> tuple[str, ...]:
    """The files that hold them."""
    return tuple(sorted({path_of(test) for test in self.tests}))


def read_record(record: Mapping[str, Any], *, snapshot: str, image: str, graded: bool) -> RepositoryRecord:
  """Reads a record of SWE-bench's form, in which lists may be lists or their JSON.

  Args:
    record: of a data set.
    snapshot: its field with the snapshot, unused with an image.
    image: its field with the name of a docker image, or SWEBENCH; "": there is none.
    graded: it must have tests.

  Raises:
    BadPrompt: it lacks a field, or one has another form.
  """

  def text(field: str, default: str | None = None) -> str:
    value = default if record.get(field) is None else record[field]
    if not isinstance(value, str):
      raise _bad(record, f"has {field!r} = {value!r:.80}, which is no text")
    return value

  def ids(field: str) -> tuple[str, ...]:
    value = record.get(field)
    try:
      value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
      value = None
    value = [] if value is None and not graded else value
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) and path_of(test) for test in value):
      raise _bad(record, f"has {field!r} = {record.get(field)!r:.80}, which is no list of tests")
    return tuple(value)

  # A field that is there and wrong is refused, one that is not wanted is not looked at.
  read = RepositoryRecord(
    instance_id=text("instance_id"),
    problem_statement=text("problem_statement"),
    base_commit=text("base_commit", ""),
    test_patch=text("test_patch", ""),
    fail_to_pass=ids("FAIL_TO_PASS"),
    pass_to_pass=ids("PASS_TO_PASS"),
    snapshot=None if image else record.get(snapshot),
    image=image_name(text("instance_id")) if image == SWEBENCH else text(image) if image else "",
    patch=text("patch", ""),
  )
  if graded and not read.fail_to_pass:
    raise _bad(record, "has no test in FAIL_TO_PASS")
  return read


def image_name(instance_id: str) -> str:
  """Returns the name under which SWE-bench publishes the image of a task.

  >>> image_name("django__django-11099")
  'swebench/sweb.eval.x86_64.django_1776_django-11099:latest'
  """
  return f"swebench/sweb.eval.x86_64.{instance_id.lower().replace('__', '_1776_')}:latest"


def touched_paths(patch: str) -> tuple[str, ...]:
  """Lists the files that a diff creates, changes, renames or deletes, under their old and new names.

  >>> touched_paths("--- a/m.py\\n+++ b/m.py\\n@@ -1 +1 @@\\n-x\\n+y\\n")
  ('m.py',)
  """
  found = (match.group("old", "new", "path") for match in TOUCHED.finditer(patch))
  return tuple(sorted({path for paths in found for path in paths if path}))


def _bad(record: Mapping[str, Any], problem: str) -> BadPrompt:
  name = record.get("instance_id")
  return BadPrompt("environment.data", f"Record {name!r:.80} {problem}", "Correct it", reason="repository_damaged")
