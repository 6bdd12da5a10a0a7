"""Commands as harnesses: they get their task, tell their end, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from toys.paths import REPOSITORY

from sao_jax.episode import EnvironmentFailure
from sao_jax.errors import ConfigError
from sao_jax.gateway.agent import Agent
from sao_jax.gateway.harness import CommandHarness, FunctionHarness, HarnessFailure, HarnessLoop, check_command
from sao_jax.gateway.sessions import End, Session
from sao_jax.gateway.task_records import TaskRecords

# A daemon of its own session, with all its streams elsewhere.
DAEMON = "setsid sh -c 'echo $$ > {0}; exec sleep 300' < /dev/null > /dev/null 2>&1 &"


def run(*command: str, grace: float = 20.0) -> End:
  """Plays a command to its end."""

  async def play():
    session = Session({"number": 3})
    harness = CommandHarness(command, session, session.task("http://127.0.0.1:1"))
    end = await session.ended(grace)
    await harness.stop(0.0)
    return end

  return asyncio.run(play())


def is_alive(pid: int) -> bool:
  try:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False


def await_file(path: pathlib.Path) -> int:
  deadline = time.monotonic() + 20
  while not (path.exists() and path.read_text().strip()):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  return int(path.read_text())


def await_death(pid: int) -> None:
  deadline = time.monotonic() + 20
  while is_alive(pid):
    assert time.monotonic() < deadline, f"process {pid} was left behind"
    time.sleep(0.01)


def test_a_command_gets_the_address_the_key_and_the_task(tmp_path):
  script = 'echo "$OPENAI_BASE_URL $OPENAI_API_KEY"; cat'

  async def play():
    session = Session({"number": 3})
    task = session.task("http://127.0.0.1:1")
    harness = CommandHarness(("sh", "-c", f"({script}) > {tmp_path}/said"), session, task)
    assert await session.ended(20.0) == End()
    await harness.stop(0.0)
    return task

  task = asyncio.run(play())
  first, second = (tmp_path / "said").read_text().splitlines()
  assert first == f"{task.base_url} {task.key}" and task.base_url.endswith("/v1")
  told = json.loads(second)
  assert told["data"] == {"number": 3} and told["key"] == task.key and told["reward_url"] == task.reward_url


@pytest.mark.parametrize(
  "script, said",
  [
    ("exit 3", "status 3$"),
    ("echo one; echo two >&2; exit 1", "status 1, its last words: one\ntwo"),
    ("kill -9 $$", "status -9"),
    ("yes | head -c 100000; echo; echo the end; exit 1", "the end"),
    ("exec 0<&-; exit 5", "status 5"),  # its task has no reader
  ],
)
def test_a_command_that_fails_is_a_failure_with_its_last_words(script, said):
  failure = run("sh", "-c", script).failure
  assert isinstance(failure, HarnessFailure)
  with pytest.raises(EnvironmentFailure, match=said):
    raise failure
  assert len(str(failure)) < 1000


def test_what_a_command_leaves_behind_is_killed_at_its_end(tmp_path):
  pid = tmp_path / "pid"
  assert run("sh", "-c", f"{DAEMON.format(pid)} while [ ! -s {pid} ]; do sleep 0.01; done") == End()
  await_death(await_file(pid))


def test_a_command_that_is_given_up_is_killed_with_its_daemons(tmp_path):
  pid = tmp_path / "pid"

  async def play():
    session = Session({})
    harness = CommandHarness(("sh", "-c", f"{DAEMON.format(pid)} sleep 300"), session, session.task(""))
    daemon = await asyncio.to_thread(await_file, pid)
    await harness.stop(0.01)
    return daemon

  await_death(asyncio.run(play()))


def test_a_command_whose_closing_is_given_up_is_killed_all_the_same(tmp_path):
  pid = tmp_path / "pid"

  async def play():
    session = Session({})
    harness = CommandHarness(("sh", "-c", f"echo $$ > {pid}; exec sleep 300"), session, session.task(""))
    command = await asyncio.to_thread(await_file, pid)
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(harness.stop(60.0), 0.05)
    await asyncio.to_thread(await_death, command)

  asyncio.run(play())


def test_a_long_task_that_is_not_read_holds_up_no_output():
  async def play():
    session = Session({"text": "x" * 400_000})
    script = "head -c 400000 /dev/zero; echo done; exit 5"
    harness = CommandHarness(("sh", "-c", script), session, session.task(""))
    end = await session.ended(20.0)
    await harness.stop(0.0)
    return end

  assert "last words: " in str(asyncio.run(play()).failure)


def test_a_coroutine_that_cancels_itself_is_a_failure():
  async def give_up(task):
    raise asyncio.CancelledError

  async def play():
    session, loop = Session({}), HarnessLoop("agent")
    FunctionHarness(give_up, loop, session, session.task(""))
    end = await session.ended(20.0)
    loop.close()
    return end

  assert isinstance(asyncio.run(play()).failure, HarnessFailure)


PARENT = f"""
import asyncio, sys
sys.path[:0] = [{str(REPOSITORY)!r}]
from sao_jax.gateway.harness import CommandHarness
from sao_jax.gateway.sessions import Session
async def play():
  session = Session({{}})
  harness = CommandHarness(("sh", "-c", sys.argv[1]), session, session.task(""))
  await session.ended(300)
asyncio.run(play())
"""


def test_a_command_dies_with_the_process_that_trains_however_that_ends(tmp_path):
  pid, own = tmp_path / "pid", tmp_path / "own"
  script = f"{DAEMON.format(pid)} echo $$ > {own}; trap '' TERM; while :; do sleep 300; done"
  parent = subprocess.Popen([sys.executable, "-c", PARENT, script])
  daemon, command = await_file(pid), await_file(own)
  os.kill(parent.pid, signal.SIGKILL)
  parent.wait()
  for left in (daemon, command):
    await_death(left)


def test_a_keeper_that_is_killed_takes_its_command_along(tmp_path):
  own = tmp_path / "own"

  async def play():
    session = Session({})
    harness = CommandHarness(("sh", "-c", f"echo $$ > {own}; exec sleep 300"), session, session.task(""))
    command = await asyncio.to_thread(await_file, own)
    keeper = pathlib.Path(f"/proc/{command}/stat").read_text().rpartition(")")[2].split()[1]
    os.kill(int(keeper), signal.SIGKILL)
    end = await session.ended(20.0)
    await harness.stop(0.0)
    return command, end

  command, end = asyncio.run(play())
  await_death(command)
  assert isinstance(end.failure, HarnessFailure)


@pytest.mark.parametrize("field", ["harness", "reward", "demonstrations"])
@pytest.mark.parametrize("name", ["nothing", "no.such.module:play", "json:nothing", "json:decoder", "a b:c"])
def test_a_function_that_is_none_is_refused(field, name):
  with pytest.raises(ConfigError, match=f"environment.{field}"):
    Agent(**{"harness": "json:loads", "tasks": TaskRecords("tasks.jsonl", ("question",)), field: name})


@pytest.mark.parametrize("command", [(), ("no-such-program",), (3,)])
def test_a_command_that_is_none_is_refused(command):
  with pytest.raises(ConfigError, match="environment.harness"):
    check_command(command, "environment.harness")
