"""A repository in a sandbox's work folder: how it comes there, and the patch that an agent has made of it."""

from __future__ import annotations

from sao_jax.episode import EnvironmentFailure
from sao_jax.sandbox.contract import Sandbox

SETUP_TIMEOUT = 600.0  # seconds, as for all that git does with a large repository
# Nothing that an agent has configured speaks here. The history is one commit, whose date tells nothing.
ENVIRONMENT = {
  "GIT_CONFIG_NOSYSTEM": "1",
  "GIT_CONFIG_GLOBAL": "/dev/null",
  "GIT_ATTR_NOSYSTEM": "1",
  "GIT_NO_REPLACE_OBJECTS": "1",
  "HOME": "/tmp",
  **{f"GIT_{who}_{what}": text for who in ("AUTHOR", "COMMITTER") for what, text in (("NAME", "base"), ("EMAIL", ""))},
  **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
}
GIT = "git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.autocrlf=false -c gc.auto=0"
UNPACK = "tar -x -f -"
COPY = 'tar -C "$1" --exclude=./.git -c -f - . | tar -x -f -'
COMMIT = f"{GIT} init -q --template= -b main . && {GIT} add -A -f . && {GIT} commit -q --allow-empty -m base"
# A lock is what a command that was killed leaves behind. Ignored files are not part of a patch, as usual.
DIFF = f"""rm -f .git/index.lock
{GIT} add -A . && {GIT} diff --cached --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv \
--src-prefix=a/ --dst-prefix=b/ "$1"
"""


async def place_files(sandbox: Sandbox, name: str, archive: bytes | None, image_folder: str) -> None:
  """Puts the files of the base commit into the work folder, without any history.

  Args:
    sandbox: an empty one.
    name: of the environment, for failures.
    archive: of `read_snapshot`; None: they are copied from the image.
    image_folder: the repository in the image.

  Raises:
    EnvironmentFailure: they did not fit, or the image has none.
  """
  script = COPY if archive is None else UNPACK
  await _run(sandbox, name, script, image_folder, stdin=archive or b"")


async def commit_base(sandbox: Sandbox, name: str) -> str:
  """Makes a repository of the work folder, with all of it in one commit; returns the commit's id."""
  said = await _run(sandbox, name, f"{COMMIT} && {GIT} rev-parse HEAD")
  return said.decode("ascii").strip()


async def read_patch(sandbox: Sandbox, base: str, timeout: float) -> str | None:
  """Reads the agent's patch: the difference of the work folder to the base commit, new files included.

  Returns:
    A diff that `git apply` takes; None if there is none to be had within so many seconds, because it is too large, or
    an agent's filters take longer, or git finds no repository.
  """
  result = await sandbox.run(["sh", "-c", DIFF, "sh", base], timeout=timeout, environment=ENVIRONMENT)
  if result.exit_status != 0:
    return None
  try:
    return result.stdout.decode("utf-8")
  except UnicodeDecodeError:  # text of another encoding, which no prediction could hold
    return None


async def _run(sandbox: Sandbox, name: str, script: str, *words: str, stdin: bytes = b"") -> bytes:
  """Runs a script of this module on files that no agent has touched; returns what it wrote."""
  command = ["sh", "-c", script, "sh", *words]
  result = await sandbox.run(command, stdin=stdin, timeout=SETUP_TIMEOUT, environment=ENVIRONMENT)
  if result.exit_status != 0:
    said = result.stderr.decode("utf-8", "replace").strip()[-300:]
    problem = f"the repository could not be set up: {result.killed_for or result.exit_status} {said}"
    raise EnvironmentFailure(name, f"{problem}; SandboxLimits may be too small for it")
  return result.stdout
