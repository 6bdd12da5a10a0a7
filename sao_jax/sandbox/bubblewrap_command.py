"""The command line of bubblewrap: what a local sandbox sees of this machine, and the check that it can be made here."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable

from sao_jax.errors import ConfigError
from sao_jax.sandbox import supervisor
from sao_jax.sandbox.contract import DEFAULT_LIMITS, SandboxLimits

OLDEST = (0, 8)  # the first bubblewrap that has --size and --disable-userns
NOBODY = 65534  # whom root becomes first: the kernel limits no process of root's
INSIDE = 1000  # user and group inside
TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
SETTINGS = ("ld.so.cache", "alternatives", "localtime", "ssl/certs", "mime.types")  # of /etc; names no user and no host
ACCOUNTS = {
  "passwd": f"agent:x:{INSIDE}:{INSIDE}::{supervisor.WORK}:/bin/sh\n",
  "group": f"agent:x:{INSIDE}:\n",
  "hosts": "127.0.0.1 localhost\n::1 localhost\n",
  "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
PROBE_TIMEOUT = 60.0  # seconds
REMEDY = (
  "Allow user namespaces (sudo sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000; "
  "on Ubuntu 24.04 and later also kernel.apparmor_restrict_unprivileged_userns=0), or use the DockerSandbox. "
  "Inside of a container they need its runtime's leave, as docker run --privileged gives it."
)


@dataclasses.dataclass(frozen=True)
class View:
  """Folders that a local sandbox sees beside the system's programs and libraries, /usr.

  Attributes:
    read_only: absolute paths of further folders, seen at the same place, as a virtual environment of tools is.
    hidden: absolute paths of folders below those that are empty inside. This project itself is always hidden.
  """

  read_only: tuple[str, ...] = ()
  hidden: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    for field, paths in (("read_only", self.read_only), ("hidden", self.hidden)):
      for path in paths:
        if not os.path.isabs(path) or not os.path.isdir(path) or os.path.realpath(path) == "/":
          raise ConfigError(f"View.{field}", f"{path!r} is no folder that can be named here.", "Name an absolute path.")


SYSTEM = View()  # nothing else


def check_bubblewrap(view: View) -> None:
  """Makes a sandbox and runs nothing in it; takes a moment, for the time before work starts.

  Raises:
    ConfigError: bubblewrap is missing or too old, there is no Python for the inside, or this machine allows no user
      namespaces.
  """
  program = shutil.which("bwrap")
  if program is None:
    raise ConfigError("sandbox", "bubblewrap is not installed.", "Debian and Ubuntu: sudo apt-get install bubblewrap.")
  said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT).stdout
  version = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
  if version < OLDEST:
    raise ConfigError("sandbox", f"{said.strip()} is too old, 0.8 is needed.", "Debian 12 and Ubuntu 24.04 have it.")

  # The whole command line, with a Python that ends at once in place of the supervisor.
  command = [*prefix(program), *folders(view, DEFAULT_LIMITS), "--", find_python(view), "-I", "-S", "-c", "pass"]
  done = subprocess.run(command, env={}, cwd="/", capture_output=True, text=True, timeout=PROBE_TIMEOUT)
  if done.returncode:
    problem = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    raise ConfigError("sandbox", f"bubblewrap cannot make a sandbox here: {problem}.", REMEDY)


def sandbox_command(view: View, limits: SandboxLimits, accounts: dict[str, int], seccomp: int | None) -> list[str]:
  """Makes the command that starts a sandbox with its supervisor.

  Args:
    accounts: for each of ACCOUNTS, a descriptor to read it from.
    seccomp: a descriptor with the filter of system calls, if there is one for this machine.
  """
  data = [word for name, descriptor in accounts.items() for word in ("--ro-bind-data", str(descriptor), f"/etc/{name}")]
  filtered = [] if seccomp is None else ["--seccomp", str(seccomp)]
  script = pathlib.Path(supervisor.__file__).read_text(encoding="utf-8")
  told = json.dumps(dataclasses.asdict(limits))
  inside = [find_python(view), "-I", "-S", "-c", script, told]
  return [*prefix(shutil.which("bwrap") or "bwrap"), *data, *folders(view, limits), *filtered, "--", *inside]


def prefix(program: str) -> list[str]:
  """Begins the command: namespaces of all kinds, no capability, an end with ours; root becomes nobody first."""
  become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"] if os.geteuid() == 0 else []
  spaces = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(INSIDE), "--gid", str(INSIDE)]
  end = ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
  return [*become, program, *spaces, *end]


def folders(view: View, limits: SandboxLimits) -> list[str]:
  """Lists the mounts: the system and the view read-only; a work folder, /tmp and /dev/shm of limited size."""
  words = ["--ro-bind", "/usr", "/usr"]
  for name in TOP:
    path = f"/{name}"
    if os.path.islink(path):
      words += ["--symlink", os.readlink(path), path]
    elif os.path.isdir(path):
      words += ["--ro-bind", path, path]
  for name in SETTINGS:
    words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
  for path in view.read_only:
    words += ["--ro-bind", path, path]

  # An empty folder lies over what must not be seen, where it would be.
  shown = ("/usr", *view.read_only)
  for path in (*project_folders(), *view.hidden):
    for place in places_inside(path, shown):
      words += ["--size", "4096", "--tmpfs", place, "--remount-ro", place]

  # Nothing but the three can be written to: a file system without a limit would be memory without a limit.
  # So would /dev/zero be, mapped and shared; /dev/full reads the same, and cannot be mapped.
  words += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
  for path in supervisor.WRITABLE:
    words += ["--size", str(limits.disk), "--tmpfs", path]
  return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", supervisor.WORK]


def project_folders() -> list[str]:
  """Names what of this project may lie among the system's files: its checkout, or its installed packages."""
  package = pathlib.Path(__file__).resolve().parents[1]
  if (package.parent / "setup.py").exists():
    return [str(package.parent)]
  return [str(path) for path in (package, package.parent / "launch", package.parent / "configs") if path.is_dir()]


def places_inside(path: str, shown: Iterable[str]) -> list[str]:
  """Names the places at which a folder is seen, given the folders that are shown: one of these may be a symlink."""
  below = [folder for folder in shown if is_below(path, folder)]
  real = os.path.realpath
  return sorted({os.path.normpath(f"{folder}/{os.path.relpath(real(path), real(folder))}") for folder in below})


def is_below(path: str, folder: str) -> bool:
  """Tells if a path is a folder or lies below it, both as the file system resolves them."""
  return pathlib.Path(path).resolve().is_relative_to(pathlib.Path(folder).resolve())


def find_python(view: View) -> str:
  """Finds a Python that is seen inside: the supervisor runs in it, and agents may.

  Raises:
    ConfigError: there is none.
  """
  candidates: Iterable[str] = [
    *(f"{folder}/bin/python3" for folder in view.read_only),
    *("/usr/bin/python3", "/usr/local/bin/python3"),
  ]
  for candidate in candidates:
    if os.access(candidate, os.X_OK) and any(is_below(candidate, folder) for folder in ("/usr", *view.read_only)):
      return candidate
  raise ConfigError(
    "sandbox",
    "no Python lies where the sandbox sees it, in /usr/bin, /usr/local/bin or one of View.read_only.",
    "Debian and Ubuntu: sudo apt-get install python3, or add the folder of one to View.read_only.",
  )
