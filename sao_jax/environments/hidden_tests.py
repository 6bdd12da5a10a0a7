"""Hidden tests of a repository: they come into a fresh sandbox, behind the agent's last action, and decide the reward.

    base commit + test_patch          files of tests, as their authors wrote them
    + the agent's patch               without what it did to tests and to what configures them
    two sessions of the judge         each test once as it is, once as a control that must fail

The tests import the agent's code, so whatever runs in their process can be tampered with; see `control_tests` and
`judging_script` for what is done about it, and the README for what is not.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import posixpath
import random
import re
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from sao_jax.environments import judging_script
from sao_jax.environments.control_tests import Session, split_tests
from sao_jax.environments.repository_record import RepositoryRecord, touched_paths
from sao_jax.environments.repository_work import ENVIRONMENT, GIT, SETUP_TIMEOUT, place_files
from sao_jax.episode import BadPrompt, GraderFailure
from sao_jax.sandbox.contract import FileRefused, Sandbox

Runner = Literal["pytest", "functions", "none"]
RUNNERS = ("pytest", "functions", "none")
MAX_TEST_FILE = 8 * 2**20  # bytes
GRACE = 5.0  # seconds for the judge itself; and a quarter of a session's time, since large repositories are copied
APPLY = f"{GIT} apply --whitespace=nowarn"
# What decides how tests are found and run is none of the agent's business; nor is bytecode, which could be anything.
CONFIGURING = (
  *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
  *("pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.so.pth"),
)
FOLDERS_OF_TESTS = ("test", "tests", "testing")


@dataclasses.dataclass(frozen=True)
class Judgement:
  """The end of the hidden tests.

  Attributes:
    applied: the agent's patch could be applied.
    failed: ids of tests that did not pass, in the order of the record.
    forged: what shows that tests were made to pass: controls that passed, functions that were replaced.
    log: the end of what the tests have printed; it may show hidden values, and is not for the agent.
  """

  applied: bool
  failed: tuple[str, ...]
  forged: tuple[str, ...]
  log: str

  @property
  def resolved(self) -> bool:
    return self.applied and not self.failed and not self.forged

  def fraction(self, tests: Sequence[str]) -> float:
    """Returns the share of these tests that passed, 1 of none."""
    failed = set(self.failed)
    return sum(test not in failed for test in tests) / len(tests) if tests else 1.0


@dataclasses.dataclass(frozen=True)
class Bench:
  """The settings of hidden tests, for all records alike.

  Attributes:
    name: the environment's, for failures.
    runner: "pytest", or "functions" for plain functions without fixtures, which needs no package.
    python: the interpreter inside.
    packages: folders inside to import from, behind the repository's.
    sources: folders of the repository to import from.
    image_folder: the repository in an image.
    timeout: seconds for one of the two sessions.
  """

  name: str
  runner: Runner
  python: str
  packages: tuple[str, ...]
  sources: tuple[str, ...]
  image_folder: str
  timeout: float

  @property
  def longest(self) -> float:
    """The seconds that the judge may take."""
    return 2 * self.timeout + self.timeout / 4 + GRACE

  async def judge(self, sandbox: Sandbox, record: RepositoryRecord, archive: bytes | None, patch: str) -> Judgement:
    """Runs the hidden tests on the base commit with a patch.

    Args:
      sandbox: a fresh one, in which nothing of the agent's has ever run.
      record: its tests.
      archive: the snapshot, as for `place_files`.
      patch: the agent's.

    Raises:
      BadPrompt: the record's own tests cannot be brought in.
      GraderFailure: the judge could not work.
      InfrastructureFailure: the sandbox is gone.
    """
    # The tests are read before the patch is there, which could name them otherwise.
    await place_files(sandbox, self.name, archive, self.image_folder)
    if record.test_patch.strip() and (said := await _apply(sandbox, record.test_patch)):
      raise _bad(record, f"has a test_patch that does not fit its base commit: {said}")
    files = {path: await _read(sandbox, record, path) for path in record.test_files}

    # A patch that does not fit without its changes to tests leads nowhere.
    if patch.strip() and await _apply(sandbox, patch, excluded_paths(record)):
      return Judgement(False, record.tests, (), "")
    return await self._run(sandbox, record, files)

  async def _run(self, sandbox: Sandbox, record: RepositoryRecord, files: Mapping[str, str]) -> Judgement:
    """Runs the judge on the work folder as it is."""
    word, sessions = secrets.token_hex(16), split_tests(files, record.tests, random.SystemRandom())
    packages, sources = list(self.packages), list(self.sources)
    task = {"runner": self.runner, "packages": packages, "sources": sources, "timeout": self.timeout}
    parts = [json.dumps(task), *(json.dumps(_told(session)) for session in sessions), word]
    # Everything enters by standard input; nothing stands in a file or on a command line.
    script = pathlib.Path(judging_script.__file__).read_text(encoding="utf-8")
    result = await sandbox.run(
      [self.python, "-I", "-B", "-c", script],
      stdin=b"".join(f"{len(part)}\n{part}".encode("ascii") for part in parts),
      timeout=self.longest,
      environment={"HOME": "/tmp"},
    )

    # Only the judge knows the word. Without it nothing is known of the tests.
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    answers = [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]
    if not answers:
      said = result.stderr.decode("utf-8", "replace").strip()[-300:]
      # Once tests run, whatever ends or stops the judge is the agent's code, and no way to get rid of an episode.
      if result.killed_for in ("memory", "disk") or lines[:1] == [judging_script.BEGUN]:
        return Judgement(True, record.tests, (), said)
      problem = f"the judge of the tests did not finish ({result.killed_for or result.exit_status}): {said}"
      raise GraderFailure(self.name, problem)
    answer = json.loads(answers[0])
    if answer["problem"]:
      raise GraderFailure(self.name, f"{answer['problem']}; name its folder in environment.packages")
    return _conclude(record, sessions, answer)


def excluded_paths(record: RepositoryRecord) -> tuple[str, ...]:
  """Lists patterns of `git apply` for files that stay as the tests' authors left them."""
  patterns = [*CONFIGURING, "__pycache__/*", "sitecustomize/*", "usercustomize/*"]
  patterns += [f"*/{pattern}" for pattern in patterns]
  for path in {*record.test_files, *touched_paths(record.test_patch)}:
    folders = posixpath.dirname(path).split("/")
    inside = next((place for place, name in enumerate(folders) if name in FOLDERS_OF_TESTS), None)
    patterns.append(_literally(path))
    if inside is not None:  # with helpers and data of the tests
      patterns.append(f"{_literally('/'.join(folders[: inside + 1]))}/*")
  return tuple(dict.fromkeys(patterns))


def _conclude(record: RepositoryRecord, sessions: Sequence[Session], answer: Mapping[str, Any]) -> Judgement:
  """Compares what the judge has heard with what must be so."""
  passed = [set(told["passed"]) for told in answer["told"]]
  expected = [set(told["xfailed"]) for told in answer["told"]]
  failed: set[str] = set()
  for session, good in zip(sessions, map(set.union, passed, expected), strict=True):
    failed |= session.originals - good

  # A control that was turned around passes where its test fails; it says nothing then.
  controls = [session.controls & names - failed for session, names in zip(sessions, passed, strict=True)]
  forged = [f"the control of {test} passed" for test in sorted(set().union(*controls))]
  forged += [f"{name} was replaced" for told in answer["told"] for name in told["replaced"]]
  ordered = tuple(test for test in record.tests if test in failed)
  return Judgement(True, ordered, tuple(dict.fromkeys(forged)), answer["log"])


def _told(session: Session) -> dict[str, Any]:
  """Writes a session as the judge reads it, which need not know what is a control."""
  return {"files": session.files, "wanted": sorted(session.originals | session.controls)}


async def _apply(sandbox: Sandbox, patch: str, excluded: Iterable[str] = ()) -> str:
  """Applies a diff to the work folder but for excluded paths; returns why it could not."""
  options = " ".join(shlex.quote(f"--exclude={pattern}") for pattern in excluded)
  command = ["sh", "-c", f"{APPLY} {options} -"]
  result = await sandbox.run(command, stdin=patch.encode("utf-8"), timeout=SETUP_TIMEOUT, environment=ENVIRONMENT)
  said = result.stderr.decode("utf-8", "replace").strip()[-300:]
  return "" if result.exit_status == 0 else said or f"exit status {result.killed_for or result.exit_status}"


async def _read(sandbox: Sandbox, record: RepositoryRecord, path: str) -> str:
  """Reads a file of tests."""
  try:
    return (await sandbox.read_file(path, MAX_TEST_FILE)).decode("utf-8")
  except (FileRefused, UnicodeDecodeError) as error:
    raise _bad(record, f"has tests in {path!r}, which cannot be read: {error}") from error


def _literally(path: str) -> str:
  """Escapes a path for a pattern."""
  return re.sub(r"([*?\[\\])", r"\\\1", path)


def _bad(record: RepositoryRecord, problem: str) -> BadPrompt:
  remedy = "Correct it"
  return BadPrompt("environment.data", f"Record {record.instance_id!r} {problem}", remedy, reason="repository_damaged")
