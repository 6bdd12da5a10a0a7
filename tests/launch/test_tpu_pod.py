"""The script for TPU VM pods, against a stand-in for gcloud whose workers are folders of this machine."""

from __future__ import annotations

import math
import os
import pathlib
import shlex
import subprocess
import time

import pytest
import yaml

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = REPOSITORY / "launch" / "tpu_pod.sh"
WHERE = ("--name=pod", "--zone=z1")

GCLOUD = """#!/usr/bin/env bash
# gcloud compute tpus tpu-vm VERB NAME --zone=... ...; the pod has two workers, homes/0 and homes/1.
set -euo pipefail
cd "$(dirname "$0")"
printf '%s\\n' "$(printf '%q ' "${@//$'\\n'/;}")" >>calls
verb="$4"
workers="0 1"
for argument in "$@"; do
  case "$argument" in
    --worker=all) ;;
    --worker=*) workers="${argument#*=}" ;;
    --command=*) script="${argument#*=}" ;;
  esac
done
case "$verb" in
  describe) cat state 2>/dev/null || { echo "ERROR: NOT_FOUND: no pod" >&2; exit 1; } ;;
  create) echo READY >state; mkdir -p homes/0 homes/1 ;;
  delete) rm state ;;
  scp) for worker in $workers; do cp "$5" "homes/$worker/${6#*:}"; done ;;
  ssh)
    for worker in $workers; do
      (cd "homes/$worker" && HOME="$PWD" bash -c "$script")
    done ;;
esac
"""

# Installs nothing, and runs until it is stopped, as a launcher does: it saves, and its status says so.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  "-m launch."*) echo "$*"; trap 'exit 75' TERM; for _ in $(seq 600); do sleep 0.05; done ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
  """A folder with the stand-ins; `script(command, ...)` runs the script with them."""
  for name, text in (("gcloud", GCLOUD), ("bin/python", PYTHON)):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
  return tmp_path


def script(machine: pathlib.Path, *arguments: str, status: int = 0) -> str:
  """What the script prints; its exit status must be the one given."""
  environment = os.environ | {"PATH": f"{machine}:{os.environ['PATH']}", "VIRTUAL_ENV": str(machine)}
  done = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=60)
  assert done.returncode == status, done.stdout + done.stderr
  return done.stderr if status else done.stdout


def verbs(machine: pathlib.Path) -> list[str]:
  """The verbs of all calls of gcloud so far."""
  return [line.split()[3] for line in (machine / "calls").read_text().splitlines()]


def head() -> str:
  """The commit of the repository."""
  command = ["git", "rev-parse", "HEAD"]
  return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


def test_a_dry_run_prints_the_commands_and_runs_none(machine):
  create = script(machine, "create", *WHERE, "--type=v5p-128", "--project=p", "--spot", "--dry_run")
  assert create == (
    "gcloud compute tpus tpu-vm create pod --accelerator-type=v5p-128 --version=v2-alpha-tpuv5 --spot"
    " --zone=z1 --project=p\n"
  )

  copy, install = script(machine, "install", *WHERE, "--dry_run").split("\n", 1)
  copy, install = shlex.split(copy), shlex.split(install)
  assert copy[3:5] == ["tpu-vm", "scp"] and copy[6:] == [f"pod:sao_jax-{head()}.tar.gz", "--worker=all", "--zone=z1"]
  assert install[3:7] == ["tpu-vm", "ssh", "pod", "--worker=all"] and f"\ncd sao_jax-{head()}\n" in install[7]

  start = shlex.split(script(machine, "start", *WHERE, "--dry_run", "--", "launch.train", "--workdir=gs://b/a b"))
  assert start[3:7] == ["tpu-vm", "ssh", "pod", "--worker=all"]
  assert "-m launch.train --workdir=gs://b/a\\ b " in start[7]
  assert script(machine, "fetch", *WHERE, "--from=gs://b/a", f"--to={machine}/here", "--dry_run") == (
    f"gcloud storage rsync --recursive gs://b/a {machine}/here\n"
  )
  assert script(machine, "delete", *WHERE, "--dry_run").endswith("delete pod --quiet --zone=z1\n")
  assert not (machine / "calls").exists()


def test_the_commands_of_the_readme_are_those_of_the_script(machine):
  section = (REPOSITORY / "README.md").read_text().split("## On a TPU pod")[1]
  commands = section.split("```")[1].splitlines()[1:]
  assert len(commands) == 10
  variables = dict(part.split("=", 1) for part in shlex.split(commands[2])[1:])

  verbs_called = []
  for command in commands[3:]:
    # As a shell reads it: $POD stands for several words.
    path, *arguments = shlex.split(command.replace("$POD", variables["POD"]).replace("$RUN", variables["RUN"]))
    assert (REPOSITORY / path).samefile(SCRIPT)
    position = arguments.index("--") if "--" in arguments else len(arguments)
    printed = script(machine, *arguments[:position], "--dry_run", *arguments[position:])
    assert "sao" in printed or variables["RUN"] in printed
    verbs_called.append(arguments[0])
  assert verbs_called == ["create", "install", "start", "tail", "stop", "fetch", "delete"]


def test_a_pod_from_making_it_to_deleting_it_with_every_command_given_twice(machine):
  for _ in range(2):
    told = script(machine, "create", *WHERE, "--type=v5p-16")
  assert told == "pod is there (READY).\n" and verbs(machine) == ["describe", "create", "describe"]

  # All workers get the same commit, once.
  for _ in range(2):
    script(machine, "install", *WHERE)
  folders = [sorted(path.name for path in (machine / "homes" / worker).iterdir()) for worker in "01"]
  assert folders == [[f"sao_jax-{head()}"]] * 2
  assert (machine / "homes" / "1" / f"sao_jax-{head()}" / "launch" / "train.py").is_file()

  # One process per worker, whatever its arguments hold.
  assert script(machine, "status", *WHERE).count("not started") == 2
  first = script(machine, "start", *WHERE, "--", "launch.train", "--workdir=gs://b/a b", "--seed=1")
  second = script(machine, "start", *WHERE, "--", "launch.train", "--workdir=gs://b/a b", "--seed=1")
  try:
    assert first.count("started, process") == 2 and second.count("already running") == 2
    log = machine / "homes" / "0" / "sao_jax.log"
    deadline = time.monotonic() + 20
    while "launch.train" not in log.read_text() and time.monotonic() < deadline:
      time.sleep(0.05)
    assert log.read_text() == "-m launch.train --workdir=gs://b/a b --seed=1\n"
    assert script(machine, "status", *WHERE).count("running: -m launch.train") == 2
  finally:
    stopped = script(machine, "stop", *WHERE)
  assert stopped.count("ended with status 75") == 2
  assert script(machine, "status", *WHERE).count("ended with status 75") == 2
  assert script(machine, "stop", *WHERE).count("ended") in (0, 2)

  for told in ("", "pod is there no more"):
    assert script(machine, "delete", *WHERE) == ("pod is not there.\n" if told else "")
  assert not (machine / "state").exists()


def test_a_pod_that_was_taken_away_is_named(machine):
  (machine / "state").write_text("PREEMPTED\n")
  told = script(machine, "create", *WHERE, "--type=v5p-16", status=1)
  assert "PREEMPTED" in told and "remedy: launch/tpu_pod.sh delete --name=pod --zone=z1" in told


@pytest.mark.parametrize("command", [("create", "--type=v5p-16"), ("delete",)])
def test_a_question_without_an_answer_is_an_error_and_no_pod_that_is_not_there(machine, command):
  (machine / "gcloud").write_text("#!/usr/bin/env bash\necho 'ERROR: UNAUTHENTICATED' >&2\nexit 1\n")
  told = script(machine, *command, *WHERE, status=1)
  assert "could not tell about pod" in told and "UNAUTHENTICATED" in told


@pytest.mark.parametrize(
  "arguments, named",
  [
    (("explode", *WHERE), "'explode'"),
    (("create", "--zone=z1"), "--name"),
    (("create", "--name=pod"), "--zone"),
    (("create", *WHERE), "--type"),
    (("create", *WHERE, "--type=v99-8"), "--version"),
    (("create", *WHERE, "--tpye=v5p-8"), "--tpye=v5p-8"),
    (("start", *WHERE), "after --"),
    (("install", *WHERE, "--commit=nonsense"), "'nonsense'"),
    (("fetch", *WHERE, "--from=runs/a"), "--to"),
  ],
)
def test_bad_input_is_refused_with_a_remedy_before_gcloud_is_asked(machine, arguments, named):
  told = script(machine, *arguments, status=1)
  assert told.startswith("error: ") and named in told
  assert not (machine / "calls").exists()


def test_the_job_file_of_gke_asks_for_the_hosts_of_its_slice():
  """As many pods as the topology has hosts, each with all chips of a host; what they run is a command of ours."""
  job = yaml.safe_load((REPOSITORY / "launch" / "gke" / "jobset.yaml").read_text())
  (slices,) = job["spec"]["replicatedJobs"]
  hosts = slices["template"]["spec"]
  pod = hosts["template"]["spec"]
  (container,) = pod["containers"]
  chips = math.prod(int(side) for side in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
  assert hosts["parallelism"] == hosts["completions"] == chips // container["resources"]["limits"]["google.com/tpu"]
  assert hosts["backoffLimit"] == 0  # one worker alone cannot come back

  program, *flags = container["args"]
  assert (REPOSITORY / "launch" / f"{program.removeprefix('launch.')}.py").is_file()
  config = next(flag for flag in flags if flag.startswith("--config=")).partition("=")[2]
  assert (REPOSITORY / config).is_file()
  mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
  assert any(flag.startswith(f"--workdir={mount}/") for flag in flags for mount in mounts)
