"""A small program that stands for docker's: records what it is asked for, and plays a container on this machine.

`exec` runs the command as it is, in a folder in the place of the container's work folder; `run`, `inspect` and `rm`
play the life of the container, whose state lies beside the record.
"""

from __future__ import annotations

import json
import pathlib
import sys

PROGRAM = """#!{python} -S
import json, os, sys, time
folder = {folder!r}
words = sys.argv[1:]
with open(folder + "/calls.jsonl", "a") as file:
  file.write(json.dumps(words) + "\\n")
state = lambda name: os.path.exists(folder + "/" + name)
if words[0] == "version":
  sys.exit("Cannot connect to the Docker daemon" if state("no_server") else 0)
if words[0] == "run":
  if state("no_image"):
    sys.exit("Unable to find image")
  open(folder + "/running", "w").close()
  print("ready", flush=True)
  sys.stdin.read()
  os.remove(folder + "/running")
elif words[0] == "inspect":
  print("true" if state("running") and not state("gone") else "false", "true" if state("oom") else "false")
elif words[0] == "exec":
  if state("gone"):
    sys.exit("Error response from daemon: No such container")
  command, variables, here = [], {{}}, "/workspace"
  rest = words[1:]
  while rest[0].startswith("--"):
    option = rest.pop(0)
    if option == "--env":
      name, _, value = rest.pop(0).partition("=")
      variables[name] = value
    elif option == "--workdir":
      here = rest.pop(0)
    elif option == "--user":
      rest.pop(0)
  command = [folder + word if word.startswith("/workspace") else word for word in rest[1:]]
  if command[-1] == "kill -9 -1":  # it would kill more than is in a container
    sys.exit(126 if state("full") else 0)
  os.makedirs(folder + "/workspace", exist_ok=True)
  os.chdir(folder + here)
  os.execvpe(command[0], command, {{"PATH": os.environ["PATH"], **variables}})
"""


class DockerToy:
  """The program, to be found first on the path of a test."""

  def __init__(self, folder: pathlib.Path, monkeypatch):
    self.folder = folder.resolve()
    program = self.folder / "docker"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(self.folder)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{self.folder}:/usr/local/bin:/usr/bin:/bin")

  def play(self, state: str) -> None:
    """From now on there is no server or image, the container is gone, or the kernel has killed for memory."""
    (self.folder / state).touch()

  def is_running(self) -> bool:
    return (self.folder / "running").exists()

  def calls(self, first: str) -> list[list[str]]:
    """The calls so far whose first word this is."""
    lines = (self.folder / "calls.jsonl").read_text().splitlines()
    return [words for words in map(json.loads, lines) if words[0] == first]
