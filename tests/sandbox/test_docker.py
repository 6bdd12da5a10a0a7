"""The sandbox in a container, by a program that records what docker is asked for and plays its answers."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from toys.docker_toy import DockerToy
from toys.sandboxes import PATIENT, SMALL

from sao_jax.episode import InfrastructureFailure
from sao_jax.errors import ConfigError
from sao_jax.sandbox import DockerSandbox, FileRefused


@pytest.fixture
def docker(tmp_path, monkeypatch):
  return DockerToy(tmp_path, monkeypatch)


@contextlib.asynccontextmanager
async def started():
  sandbox = await DockerSandbox.start("python:3.12", SMALL)
  try:
    yield sandbox
  finally:
    await sandbox.close()


def test_the_container_has_no_network_no_rights_and_limits(docker):
  async def run():
    async with started():
      pass

  asyncio.run(run())
  (words,) = docker.calls("run")
  pairs = set(zip(words, words[1:], strict=False))
  wanted = {
    *{("--network", "none"), ("--cap-drop", "ALL"), ("--security-opt", "no-new-privileges")},
    *{("--memory", str(SMALL.memory)), ("--memory-swap", str(SMALL.memory)), ("--shm-size", str(SMALL.disk))},
    *{("--ulimit", f"fsize={SMALL.file_bytes}"), ("--ulimit", f"nofile={SMALL.open_files}")},
    *{("--pids-limit", str(SMALL.processes + 4)), ("--entrypoint", "sh"), ("python:3.12", "-c")},
  }
  assert wanted <= pairs and {"--rm", "--init", "--read-only", "--interactive"} <= set(words)
  for folder in ("/workspace", "/tmp"):
    (tmpfs,) = [word for word in words if word.startswith(f"{folder}:")]
    assert f"size={SMALL.disk}" in tmpfs and f"nr_inodes={SMALL.files}" in tmpfs
  assert not {"--volume", "-v", "--mount", "--privileged", "--env"} & set(words)
  assert [call[-1] for call in docker.calls("rm")] == [words[words.index("--name") + 1]]


def test_a_command_runs_as_nobody_and_nothing_outlives_it(docker):
  async def run():
    async with started() as sandbox:
      first = await sandbox.run(
        ["sh", "-c", "cat; echo $ASKED; exit 3"], stdin=b"in ", timeout=PATIENT, environment={"ASKED": "a=b"}
      )
      assert (first.exit_status, first.stdout, first.killed_for) == (3, b"in a=b\n", "")
      await sandbox.write_file("deep/er/x", b"text")
      inside = await sandbox.run(["cat", "x"], timeout=PATIENT, cwd="deep/er")
      assert inside.stdout == b"text" and sandbox.calls == 3
      for word in ("\0", "\ud800", 2**17 * "x"):
        assert (await sandbox.run(["echo", word], timeout=PATIENT)).exit_status == 126
      with pytest.raises(FileRefused):
        await sandbox.write_file("\ud800", b"text")

  asyncio.run(run())
  calls = docker.calls("exec")
  assert len(calls) == 6 and all(words[words.index("--user") + 1] == "65534:65534" for words in calls)
  assert [words[-1] for words in calls[1::2]] == ["kill -9 -1"] * 3
  assert calls[4][calls[4].index("--workdir") + 1] == "/workspace/deep/er"


def test_files_are_read_and_written_whole_or_refused(docker):
  async def run():
    async with started() as sandbox:
      data = bytes(range(256)) * 1000
      await sandbox.write_file("-x y", data)
      assert await sandbox.read_file("./-x y", len(data)) == data
      with pytest.raises(FileRefused, match=f"{len(data)} bytes, more than 9"):
        await sandbox.read_file("-x y", 9)
      await sandbox.run(["sh", "-c", "ln -s /etc linked; ln -s /etc/passwd one; mkfifo fifo; mkdir folder"], timeout=60)
      for path in ("linked/passwd", "one", "fifo", "folder", "missing", "no/thing"):
        with pytest.raises(FileRefused):
          await sandbox.read_file(path, 10**6)
      for path in ("linked/passwd", "one", "fifo", "folder"):
        with pytest.raises(FileRefused):
          await sandbox.write_file(path, b"")
      for path in ("/etc/passwd", "../x"):
        with pytest.raises(FileRefused, match="below it"):
          await sandbox.read_file(path, 10)

  asyncio.run(run())


def test_time_output_and_memory_are_bounded(docker):
  async def run():
    async with started() as sandbox:
      late = await sandbox.run(["sh", "-c", "trap '' TERM; echo begun; exec sleep 60"], timeout=2.0)
      assert (late.exit_status, late.timed_out, late.killed_for, late.stdout) == (None, True, "time", b"begun\n")
      much = await sandbox.run(["cat", "/dev/zero"], timeout=PATIENT)
      assert much.killed_for == "output" and len(much.stdout) == SMALL.output and much.truncated > 0
      killed = await sandbox.run(["sh", "-c", "exit 137"], timeout=PATIENT)
      assert (killed.exit_status, killed.killed_for) == (137, "")
      docker.play("oom")
      killed = await sandbox.run(["sh", "-c", "exit 137"], timeout=PATIENT)
      assert (killed.exit_status, killed.killed_for) == (None, "memory")

  asyncio.run(run())


def test_a_container_that_is_gone_is_a_failure_and_a_command_that_says_so_is_not(docker):
  said = "echo 'Error response from daemon: No such container' >&2; exit 1"

  async def run():
    async with started() as sandbox:
      assert (await sandbox.run(["sh", "-c", said], timeout=PATIENT)).exit_status == 1
      docker.play("gone")
      for _ in range(2):
        with pytest.raises(InfrastructureFailure):
          await sandbox.run(["true"], timeout=PATIENT)

  asyncio.run(run())


def test_a_container_in_which_nothing_can_be_killed_is_of_no_use_any_more(docker):
  async def run():
    async with started() as sandbox:
      docker.play("full")  # of processes
      assert (await sandbox.run(["true"], timeout=PATIENT)).exit_status == 0
      with pytest.raises(InfrastructureFailure, match="could not be killed"):
        await sandbox.run(["true"], timeout=PATIENT)

  asyncio.run(run())


def test_a_container_that_does_not_start_is_a_failure_with_dockers_words(docker):
  docker.play("no_image")
  with pytest.raises(InfrastructureFailure, match="Unable to find image"):
    asyncio.run(DockerSandbox.start("nonesuch"))


def test_a_cancelled_call_ends_the_container(docker):
  async def run():
    async with started() as sandbox:
      call = asyncio.ensure_future(sandbox.run(["sleep", "60"], timeout=PATIENT))
      await asyncio.sleep(0.3)
      call.cancel()
      with pytest.raises(asyncio.CancelledError):
        await call
      end = time.monotonic() + 30.0
      while docker.is_running():  # the end of its standard input, as when this process dies
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
      with pytest.raises(InfrastructureFailure, match="cancelled"):
        await sandbox.run(["true"], timeout=PATIENT)

  asyncio.run(run())


def test_a_machine_without_docker_or_its_server_is_refused(docker, tmp_path, monkeypatch):
  assert DockerSandbox.check() == str(docker.folder / "docker")
  docker.play("no_server")
  with pytest.raises(ConfigError, match="Cannot connect"):
    DockerSandbox.check()
  monkeypatch.setenv("PATH", str(tmp_path / "empty"))
  with pytest.raises(ConfigError, match="not installed"):
    DockerSandbox.check()
