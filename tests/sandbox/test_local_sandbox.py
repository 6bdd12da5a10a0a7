"""The local sandbox: commands, files, limits, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from toys import sandboxes
from toys.paths import REPOSITORY

from sao_jax.episode import InfrastructureFailure
from sao_jax.errors import ConfigError
from sao_jax.sandbox import FileRefused, LocalSandbox, SandboxLimits, bubblewrap_command
from sao_jax.sandbox.bubblewrap_command import View


@pytest.fixture(scope="module")
def box():
  with sandboxes.open_box() as opened:
    yield opened


def test_the_sandbox_works_where_it_has_to():
  """Elsewhere the tests of this room are skipped; in continuous integration they run."""
  if os.environ.get("SAO_JAX_REQUIRE_SANDBOX"):
    assert sandboxes.missing() == ""


def test_a_command_reads_writes_and_ends(box):
  result = box.run("sh", "-c", "cat; echo no >&2; pwd; exit 7", stdin=b"hello\n")
  assert (result.exit_status, result.stdout, result.stderr) == (7, b"hello\n/workspace\n", b"no\n")
  assert (result.timed_out, result.killed_for, result.truncated) == (False, "", 0) and 0.0 < result.seconds < 60.0


def test_input_of_any_length_arrives_also_where_nobody_reads_it(box):
  assert box.run("wc", "-c", stdin=bytes(1_000_000)).stdout == b"1000000\n"
  assert box.run("true", stdin=bytes(1_000_000)).exit_status == 0


def test_a_signal_is_a_negative_status_and_a_missing_program_says_so(box):
  assert box.run("sh", "-c", "kill -9 $$").exit_status == -9
  missing = box.run("nonesuch")
  assert missing.exit_status == 126 and missing.stderr == b"nonesuch: No such file or directory\n"
  assert box.run("echo", "\0").exit_status == 126
  assert box.run("echo", "\ud800").exit_status == 126
  assert box.run().exit_status == 126


def test_variables_are_those_of_the_sandbox_and_of_the_call(box, monkeypatch):
  monkeypatch.setenv("SECRET_TOKEN", "hunter2")
  said = box.run("env", environment={"ASKED": "yes"}).stdout.decode()
  assert "ASKED=yes" in said and "HOME=/workspace" in said
  assert "hunter2" not in said


def test_files_stay_between_calls_and_folders_are_made(box):
  box(box.sandbox.write_file("a/b/c.txt", b"one"))
  assert box.run("cat", "c.txt", cwd="a/b").stdout == b"one"
  box.run("sh", "-c", "printf more >> a/b/c.txt")
  assert box(box.sandbox.read_file("a/b/c.txt", 100)) == b"onemore"
  box(box.sandbox.write_file("a/b/c.txt", b""))
  assert box(box.sandbox.read_file("a/b/c.txt", 0)) == b""


@pytest.mark.parametrize("path", ["/etc/passwd", "../etc/passwd", "a/../../x", "", "a\0b"])
def test_a_path_out_of_the_work_folder_is_refused(box, path):
  for call in (lambda: box.sandbox.read_file(path, 10), lambda: box.sandbox.write_file(path, b"")):
    with pytest.raises(FileRefused, match="below it"):
      box(call())


@pytest.mark.parametrize("made", ["ln -s /etc/passwd odd", "mkfifo odd", "ln -s odd odd", "mkdir odd"])
def test_what_is_no_plain_file_is_neither_read_nor_written(box, made):
  box.run("sh", "-c", f"rm -rf odd; {made}")
  begin = time.monotonic()
  with pytest.raises(FileRefused):
    box(box.sandbox.read_file("odd", 1000))
  with pytest.raises(FileRefused):
    box(box.sandbox.write_file("odd", b"text"))
  assert time.monotonic() - begin < sandboxes.PATIENT / 2  # nobody waited for the other end of the fifo


def test_a_symlink_among_the_folders_and_a_socket_are_refused(box):
  box.run("sh", "-c", "ln -sfn /etc linked")
  box.python("import socket; socket.socket(socket.AF_UNIX).bind('/workspace/sock')")
  for path in ("linked/passwd", "sock", "missing"):
    with pytest.raises(FileRefused):
      box(box.sandbox.read_file(path, 1000))
  with pytest.raises(FileRefused):
    box(box.sandbox.write_file("linked/x", b""))


def test_a_file_that_is_too_large_is_refused_whole(box):
  box(box.sandbox.write_file("large", bytes(2_000_000)))
  assert len(box(box.sandbox.read_file("large", 2_000_000))) == 2_000_000
  with pytest.raises(FileRefused, match="2000000 bytes, more than 1999999"):
    box(box.sandbox.read_file("large", 1_999_999))
  with pytest.raises(FileRefused):
    box(box.sandbox.write_file("larger", bytes(3_500_000)))
  box.run("rm", "-f", "large", "larger")


def test_a_command_that_ignores_sigterm_ends_in_time(box):
  result = box.run("sh", "-c", "trap '' TERM INT HUP; echo begun; while :; do sleep 0.1; done", timeout=2.0)
  assert (result.exit_status, result.timed_out, result.killed_for) == (None, True, "time")
  assert result.stdout == b"begun\n" and 2.0 <= result.seconds < 60.0


def test_nothing_outlives_its_call(box):
  text = """
    import os, time
    for _ in range(2):
      if os.fork():
        os._exit(0)
      os.setsid()
    os.close(1); os.close(2)
    while True:
      open('/workspace/alive', 'w').write(str(time.monotonic()))
  """
  box.run("rm", "-f", "alive", "seen")
  box.python(textwrap.dedent(text) + "\n")
  # One after the other: of two in a pipe, `ls` sees the second one or does not.
  look = "cat alive; ls /proc > seen; grep -c '^[0-9]*$' seen; sleep 0.2; cat alive"
  first = box.run("sh", "-c", look).stdout
  assert box.run("sh", "-c", "ps -e | grep -c python || true").stdout.strip() in (b"0", b"1")  # the supervisor
  assert box.run("sh", "-c", look).stdout == first


def test_output_is_bounded_and_counted(box):
  result = box.run("sh", "-c", "head -c 60000 /dev/zero >&2; cat /dev/zero")
  assert result.killed_for == "output" and result.exit_status is None
  assert len(result.stdout) + len(result.stderr) == sandboxes.SMALL.output and result.truncated > 0
  exact = box.run("sh", "-c", f"head -c {sandboxes.SMALL.output} /dev/zero")
  assert (exact.exit_status, exact.truncated, len(exact.stdout)) == (0, 0, sandboxes.SMALL.output)


def test_memory_of_all_processes_together_is_bounded(box):
  text = """
    import os, time
    for _ in range(4):
      if not os.fork():
        kept = bytearray(30_000_000)
        time.sleep(60)
    time.sleep(60)
  """
  assert box.python(textwrap.dedent(text)).killed_for == "memory"
  alone = box.python("bytearray(10**10)")
  assert alone.exit_status == 1 and b"MemoryError" in alone.stderr
  shared = box.python("import mmap\nmmap.mmap(-1, 10**9)")  # a page of it would keep all of it, unseen
  assert shared.exit_status == 1 and b"PermissionError" in shared.stderr


def test_processes_and_disk_and_files_are_bounded(box):
  bomb = """
    import os, time
    made = 0
    try:
      while made < 1000:
        if not os.fork():
          time.sleep(60)
          os._exit(0)
        made += 1
    except BlockingIOError:
      print(made)
  """
  assert int(box.python(textwrap.dedent(bomb)).stdout) < sandboxes.SMALL.processes
  for folder in ("/workspace", "/tmp", "/dev/shm"):
    filled = f"for i in 1 2 3; do head -c 2500000 /dev/zero > {folder}/f$i || rm -f {folder}/f*; done; ls {folder}/f*"
    assert b"No space left" in box.run("sh", "-c", filled).stderr
    box.run("sh", "-c", f"rm -f {folder}/f*")
  many = "import time\nfor i in range(10**5): open(f'/tmp/{i}', 'w')\ntime.sleep(60)"
  assert box.python(many).killed_for == "disk"
  box.run("sh", "-c", "rm -f /tmp/*")
  assert box.run("sh", "-c", "ls /tmp | wc -l").stdout == b"0\n"  # it may be emptied, and goes on


def test_a_cancelled_call_ends_everything():
  with sandboxes.open_box() as box:

    async def cancel():
      call = asyncio.ensure_future(box.sandbox.run(["sleep", "60"], timeout=60.0))
      await asyncio.sleep(0.1)
      call.cancel()
      with pytest.raises(asyncio.CancelledError):
        await call

    box(cancel())
    with pytest.raises(InfrastructureFailure, match="cancelled"):
      box.run("true")
    assert box.sandbox._process.wait(30) is not None


def test_a_call_under_way_fails_at_once_when_the_sandbox_is_closed():
  with sandboxes.open_box() as box:

    async def close():
      calls = [asyncio.ensure_future(box.sandbox.run(["sleep", "60"], timeout=60.0)) for _ in range(2)]
      await asyncio.sleep(0.1)
      await box.sandbox.close()
      for call in calls:
        with pytest.raises(InfrastructureFailure):
          await asyncio.wait_for(call, 30.0)

    box(close())


def test_a_sandbox_that_does_not_start_is_a_failure_with_its_words(tmp_path, monkeypatch):
  (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no space left' >&2\nexit 1\n")
  (tmp_path / "bwrap").chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
  monkeypatch.setattr(bubblewrap_command.os, "geteuid", lambda: 1000)
  descriptors = len(os.listdir("/proc/self/fd"))
  with pytest.raises(InfrastructureFailure, match="no space left"):
    asyncio.run(LocalSandbox.start())
  assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_descriptor_is_left_by_calls_and_sandboxes():
  with sandboxes.open_box() as first:
    descriptors = len(os.listdir("/proc/self/fd"))
    with sandboxes.open_box() as second:
      second.run("echo", "x")
      second.run("cat", "/dev/zero")
      second.run("sleep", "60", timeout=0.05)
      second(second.sandbox.write_file("x", b"text"))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert first.run("true").exit_status == 0


def test_a_sandbox_whose_process_is_killed_is_a_failure_of_the_infrastructure():
  with sandboxes.open_box() as box:

    async def kill():
      call = asyncio.ensure_future(box.sandbox.run(["sleep", "60"], timeout=60.0))
      await asyncio.sleep(0.1)
      box.sandbox._process.kill()
      with pytest.raises(InfrastructureFailure, match="ended"):
        await call

    box(kill())
    with pytest.raises(InfrastructureFailure):
      box(box.sandbox.write_file("x", b""))


def test_calls_take_turns_the_loop_never_waits_and_the_calls_are_counted(box):
  async def two():
    gaps, before = [], time.monotonic()
    calls = [asyncio.ensure_future(box.sandbox.run(["sleep", "0.2"], timeout=60.0)) for _ in range(2)]
    while not all(call.done() for call in calls):
      await asyncio.sleep(0.005)
      gaps.append(1)
    assert time.monotonic() - before >= 0.4
    return len(gaps)

  counted = box.sandbox.calls
  assert box(two()) > 5
  assert box.sandbox.calls == counted + 2


def test_nothing_is_left_after_the_parent_is_killed(tmp_path):
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())
  program = """
    import asyncio, sys
    from sao_jax.sandbox import LocalSandbox
    from sao_jax.sandbox.python_session import PythonSession
    async def main():
      sandboxes = [await LocalSandbox.start() for _ in range(3)]
      calls = [asyncio.ensure_future(each.run(["sleep", "4321.25"], timeout=600.0)) for each in sandboxes[:2]]
      session = PythonSession(sandboxes[2])
      calls.append(asyncio.ensure_future(session.execute("import time; time.sleep(4321.25)", 600.0)))
      while True:
        await asyncio.sleep(0.1)
        print(*(each._process.pid for each in sandboxes), flush=True)
    asyncio.run(main())
  """
  before = set(os.listdir("/tmp"))
  parent = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
  )
  pids = [int(pid) for pid in parent.stdout.readline().split()]
  assert len(pids) == 3
  tree: list[int] = []
  end = time.monotonic() + 30.0
  while len(tree) < 3 * 3:  # bubblewrap, supervisors and their commands
    assert time.monotonic() < end, "the commands did not start"
    tree = [pid for root in pids for pid in descendants(root)]
  parent.send_signal(signal.SIGKILL)
  parent.wait()
  end = time.monotonic() + 30.0
  while any(is_running(pid) for pid in tree):
    assert time.monotonic() < end, "processes were left behind"
    time.sleep(0.01)
  assert not [name for name in set(os.listdir("/tmp")) - before if "sandbox" in name or "bwrap" in name]


def descendants(pid: int) -> list[int]:
  children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
  return [pid, *(further for child in children for further in descendants(int(child)))]


def is_running(pid: int) -> bool:
  with contextlib.suppress(OSError):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
  return False


def test_a_machine_without_bubblewrap_or_user_namespaces_is_refused_with_the_remedy(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
    LocalSandbox.check()

  # Programs that play an old bubblewrap, and one on a machine whose kernel refuses.
  refused = "bwrap: No permissions to create new namespace"
  fakes = [("0.6.1", "", "too old"), ("0.9.0", f"echo '{refused}' >&2; exit 1", "kernel.unprivileged_userns_clone=1")]
  monkeypatch.setattr(bubblewrap_command.os, "geteuid", lambda: 1000)
  for version, then, message in fakes:
    fake = tmp_path / "bwrap"
    fake.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "bubblewrap {version}"; exit; fi\n{then}\n')
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match=message):
      LocalSandbox.check()


def test_limits_and_views_that_cannot_work_are_refused(box):
  for field in dataclasses.fields(SandboxLimits):
    with pytest.raises(ConfigError, match=field.name):
      SandboxLimits(**{field.name: 0})
  for folder in ("relative", "/nonesuch", "/"):
    with pytest.raises(ConfigError):
      View(read_only=(folder,))
  with pytest.raises(ConfigError, match="time-out"):
    box.run("true", timeout=0.0)


def test_the_project_is_hidden_where_a_symlink_shows_it(tmp_path):
  link = tmp_path / "link"
  link.symlink_to(REPOSITORY.parent)
  words = bubblewrap_command.folders(View((str(link),)), SandboxLimits())
  assert words[words.index("4096") + 1 :][:4] == [
    "--tmpfs",
    f"{link}/{REPOSITORY.name}",
    "--remount-ro",
    f"{link}/{REPOSITORY.name}",
  ]


def test_further_folders_are_seen_and_hidden_ones_are_empty(tmp_path):
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())
  shown = next(path for path in ("/opt", "/var/lib", "/srv") if os.path.isdir(path))
  words = bubblewrap_command.folders(View((shown, str(REPOSITORY)), ("/usr/share",)), SandboxLimits())
  assert words[words.index(shown) - 1] == "--ro-bind"
  for hidden in ("/usr/share", str(REPOSITORY)):  # this project, too, where a folder around it is shown
    place = max(index for index, word in enumerate(words) if word == hidden)
    assert words[place - 3 : place + 1] == ["--tmpfs", hidden, "--remount-ro", hidden]

  async def look():
    sandbox = await LocalSandbox.start(sandboxes.SMALL, View((shown,), ("/usr/share",)))
    try:
      return await sandbox.run(["sh", "-c", f"ls -d {shown}; ls /usr/share; touch {shown}/x"], timeout=60.0)
    finally:
      await sandbox.close()

  result = asyncio.run(look())
  assert result.stdout == f"{shown}\n".encode() and result.exit_status != 0
