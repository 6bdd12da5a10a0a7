"""Harnesses: the code around a policy that makes an agent of it, unchanged, and that talks to the gateway by HTTP.

A function, a coroutine, or a command plays one episode: it gets an `AgentTask`, sends chat requests, and ends with a
reward that it returns, or posts. Agents that run by themselves and claim episodes are no harness of ours.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sao_jax.episode import EnvironmentFailure, InfrastructureFailure
from sao_jax.errors import ConfigError
from sao_jax.gateway import harness_keeper
from sao_jax.gateway.sessions import AgentTask, Session

TAIL = 4000  # bytes of a command's output that are kept for its failure
SHOWN = 600  # characters of them that a failure shows

Function = Callable[[AgentTask], Any]


class HarnessFailure(EnvironmentFailure):
  """A harness raised, or its command failed: the episode has no outcome."""


class RunningHarness(Protocol):
  """A harness at work on one episode."""

  async def stop(self, grace: float) -> None:
    """Ends it, after so many seconds if it does not end by itself; nothing happens the second time."""
    ...


def check_command(command: Sequence[str], field: str) -> None:
  """Refuses a command that cannot be started, by ConfigError."""
  if not command or not all(isinstance(part, str) for part in command):
    raise ConfigError(field, f"{command!r} is no command.", "Use a tuple of texts: a program and its arguments.")
  if shutil.which(command[0]) is None:
    raise ConfigError(field, f"There is no program {command[0]!r}.", "Install it, or name it with its folder.")


class HarnessLoop:
  """An event loop in a thread of its own, in which all coroutines of a harness run; it starts with the first one."""

  def __init__(self, name: str):
    self._name, self._lock = name, threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None

  def start(self, function: Function, task: AgentTask) -> concurrent.futures.Future[Any]:
    """Starts a coroutine; cancelling the future cancels it."""
    with self._lock:
      if self._loop is None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"harness of {self._name}", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(_awaited(function, task), self._loop)

  def close(self) -> None:
    """Ends the thread."""
    with self._lock:
      if self._loop is not None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None


async def _awaited(function: Function, task: AgentTask) -> Any:
  try:
    return await function(task)
  except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop of all others
    raise RuntimeError(f"it raised {error!r}") from error


class FunctionHarness:
  """A Python function as a harness: a coroutine in the loop of all of them, any other function in its own thread.

  No thread can be ended from outside. One that is left behind ends with its next request, which is refused.
  """

  def __init__(self, function: Function, loop: HarnessLoop, session: Session, task: AgentTask):
    """Starts it; its end is told to the session."""
    self._name, self._session = session.environment, session
    if inspect.iscoroutinefunction(function):
      self._future = loop.start(function, task)
    else:
      self._future = concurrent.futures.Future()
      self._future.set_running_or_notify_cancel()
      thread = threading.Thread(target=self._run, args=(function, task), name=f"harness {task.id}", daemon=True)
      thread.start()
    self._future.add_done_callback(self._ended)

  async def stop(self, grace: float) -> None:
    """Waits for its end, see `RunningHarness`; a coroutine is cancelled then."""
    ended = asyncio.wrap_future(self._future)
    ended.add_done_callback(lambda future: future.cancelled() or future.exception())  # the session has it
    await asyncio.wait([ended], timeout=grace)
    self._future.cancel()

  def _run(self, function: Function, task: AgentTask) -> None:
    try:
      self._future.set_result(function(task))
    except BaseException as error:  # whatever it is, it belongs to the episode
      self._future.set_exception(error)

  def _ended(self, future: concurrent.futures.Future[Any]) -> None:
    if future.cancelled():  # by itself: a session whose episode has ended hears nothing any more
      self._session.finish(failure=HarnessFailure(self._name, "the harness was cancelled"))
      return
    error = future.exception()
    if error is None:
      self._session.finish(future.result())
      return
    if not isinstance(error, EnvironmentFailure):
      failure = HarnessFailure(self._name, f"the harness raised {type(error).__name__}: {error!s:.{SHOWN}}")
      failure.__cause__ = error
      error = failure
    self._session.finish(failure=error)


class CommandHarness:
  """A command as a harness, in a process group of its own, which dies with this process, however that ends.

  It gets OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and the task as JSON on its standard input.
  """

  def __init__(self, command: Sequence[str], session: Session, task: AgentTask):
    """Starts it in the running event loop; its end is told to the session."""
    self._command, self._session = command, session
    self._tail = bytearray()
    self._leash: int | None = None  # the keeper ends everything once nobody holds this end of the pipe
    self._running = asyncio.create_task(self._run(task), name=f"harness {task.id}")

  async def stop(self, grace: float) -> None:
    """Waits for its end, see `RunningHarness`; whatever it started is killed then."""
    try:
      await asyncio.wait([self._running], timeout=grace)
    finally:  # also when nobody waits for it any longer
      self._let_go()
    await asyncio.wait([self._running])

  async def _run(self, task: AgentTask) -> None:
    name = self._session.environment
    try:
      status = await self._play(task)
    except OSError as error:
      failure: EnvironmentFailure = InfrastructureFailure(name, f"the harness could not be started: {error}")
      failure.__cause__ = error
      self._session.finish(failure=failure)
      return
    finally:
      self._let_go()
    if status == 0:
      self._session.finish()
      return
    said = bytes(self._tail).decode("utf-8", "replace").strip()[-SHOWN:]
    problem = f"the harness ended with status {status}" + (f", its last words: {said}" if said else "")
    self._session.finish(failure=HarnessFailure(name, problem))

  async def _play(self, task: AgentTask) -> int:
    """Runs the command to its end; returns its exit status, negative for a signal."""
    kept, self._leash = os.pipe()
    try:
      process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", harness_keeper.__file__, str(kept), *self._command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(kept,),
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
        env=os.environ | {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.key},
      )
    finally:
      os.close(kept)

    # A command need not read its task, which nothing waits for, and its output must not fill the pipe.
    process.stdin.write(json.dumps(dataclasses.asdict(task)).encode() + b"\n")
    process.stdin.close()
    while piece := await process.stdout.read(65536):
      self._tail += piece
      del self._tail[:-TAIL]
    return harness_keeper.status_of(await process.wait())

  def _let_go(self) -> None:
    leash, self._leash = self._leash, None
    if leash is not None:
      os.close(leash)
