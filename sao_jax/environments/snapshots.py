"""Snapshots of repositories: the files of one commit as a tar archive, and nothing of what came later.

The files of a commit are read as they are stored: no hook, filter or attribute of the repository takes part.
"""

from __future__ import annotations

import io
import os
import pathlib
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from sao_jax.episode import BadPrompt

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
LINK, SUBMODULE, EXECUTABLE = "120000", "160000", "100755"  # modes in a tree of git
GIT_TIMEOUT = 600.0  # seconds
QUIET = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TERMINAL_PROMPT": "0"}


def read_snapshot(source: Any, base_commit: str, folder: str = "") -> bytes:
  """Reads a snapshot as an archive of plain files, folders and symlinks, without `.git`.

  Args:
    source: a mapping from paths to texts; or a path: a repository or bundle of git, of which the commit is taken, an
      archive, or a folder.
    base_commit: of a repository or bundle.
    folder: relative paths begin here.

  Raises:
    BadPrompt: there is no such snapshot or commit, or it cannot be read.
  """
  if isinstance(source, Mapping):
    return _pack((path, "100644", str(text).encode("utf-8")) for path, text in sorted(source.items()))
  if not isinstance(source, str) or not source:
    raise _bad(f"a snapshot is {source!r:.80}, neither a path nor a mapping of files")

  # The kind is seen from the name, or from what lies in the folder.
  path = pathlib.Path(folder, os.path.expanduser(source))
  try:
    if path.name.endswith(ARCHIVES):
      return _pack(_archived(path))
    if path.name.endswith(".bundle"):
      with tempfile.TemporaryDirectory() as clone:
        _git("clone", "--quiet", "--bare", "--no-tags", os.fspath(path.resolve()), clone)
        return _pack(_committed(clone, base_commit))
    if (path / ".git").exists() or (path / "objects").is_dir():
      return _pack(_committed(os.fspath(path), base_commit))
    if path.is_dir():
      return _pack(_found(path))
  except (OSError, tarfile.TarError, EOFError) as error:
    raise _bad(f"the snapshot {path} cannot be read: {error}") from error
  raise _bad(f"the snapshot {path} is not there, or no folder, repository, bundle or archive ({', '.join(ARCHIVES)})")


def _committed(repository: str, commit: str) -> Iterator[tuple[str, str, bytes]]:
  """Reads the files of a commit."""
  if not commit or commit.startswith("-"):
    raise _bad(f"{commit!r} is no commit")
  listed = _git("-C", repository, "ls-tree", "-r", "-z", "--full-tree", f"{commit}^{{commit}}")
  entries = [line.partition(b"\t") for line in listed.split(b"\0") if line]
  files = [(os.fsdecode(path), *meta.decode("ascii").split()) for meta, _, path in entries]
  files = [(path, mode, name) for path, mode, _, name in files if mode != SUBMODULE]  # which is another repository

  # One process gives all of them, each behind a line with its name, kind and size.
  asked = "".join(f"{name}\n" for _, _, name in files).encode("ascii")
  blobs = io.BytesIO(_git("-C", repository, "cat-file", "--batch", stdin=asked))
  for path, mode, name in files:
    header = blobs.readline().split()
    if len(header) != 3:
      raise _bad(f"{repository} lacks the object {name} of {path}")
    yield path, mode, blobs.read(int(header[2]))
    blobs.read(1)


def _archived(path: pathlib.Path) -> Iterator[tuple[str, str, bytes]]:
  """Reads the files of an archive."""
  with tarfile.open(path) as archive:
    for member in archive:
      if member.issym():
        yield member.name, LINK, os.fsencode(member.linkname)
      elif member.isfile():
        yield member.name, EXECUTABLE if member.mode & 0o100 else "100644", archive.extractfile(member).read()


def _found(folder: pathlib.Path) -> Iterator[tuple[str, str, bytes]]:
  """Reads the files of a folder."""
  for path in sorted(folder.rglob("*")):
    name = os.fspath(path.relative_to(folder))
    if path.is_symlink():
      yield name, LINK, os.fsencode(os.readlink(path))
    elif path.is_file():
      yield name, EXECUTABLE if os.access(path, os.X_OK) else "100644", path.read_bytes()


def _pack(files: Iterator[tuple[str, str, bytes]]) -> bytes:
  """Packs files, links as links; refuses names that lead elsewhere."""
  packed = io.BytesIO()
  with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
    for path, mode, data in files:
      parts = pathlib.PurePosixPath(path).parts
      if not parts or path.startswith("/") or ".." in parts:
        raise _bad(f"the snapshot has a file {path!r}, which lies outside of it")
      if ".git" in parts:
        continue

      # The same archive for the same files: no owner and no date.
      member = tarfile.TarInfo("/".join(parts))
      member.mode = 0o755 if mode == EXECUTABLE else 0o644
      if mode == LINK:
        member.type, member.linkname, data = tarfile.SYMTYPE, os.fsdecode(data), b""
      member.size = len(data)
      archive.addfile(member, io.BytesIO(data))
  return packed.getvalue()


def _git(*words: str, stdin: bytes = b"") -> bytes:
  """Runs git on this machine.

  Raises:
    BadPrompt: it is missing, or refuses.
  """
  command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", *words]
  try:
    done = subprocess.run(
      command, input=stdin, capture_output=True, timeout=GIT_TIMEOUT, env=QUIET | {"PATH": os.environ.get("PATH", "")}
    )
  except (OSError, subprocess.SubprocessError) as error:
    raise _bad(f"git cannot be run: {error}") from error
  if done.returncode:
    raise _bad(f"git says: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
  return done.stdout


def _bad(problem: str) -> BadPrompt:
  remedy = "Correct the record's snapshot and base_commit"
  return BadPrompt("environment.snapshot", problem, remedy, reason="repository_damaged")
