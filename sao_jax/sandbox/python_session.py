"""A persistent Python interpreter in a sandbox: variables live from call to call, as in a notebook.

What ends the interpreter (a crash, a call that takes too long, a limit) is the agent's fault: it is told, and the next
call has a fresh one. Answers come by a pipe of their own, and count only with a word that is new in every call: output
cannot pass for them. Code that reaches for that pipe inside of its own process can end its own call early, and no more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from sao_jax.episode import InfrastructureFailure
from sao_jax.sandbox import python_driver
from sao_jax.sandbox.bubblewrap import LocalSandbox
from sao_jax.sandbox.contract import MIB, NAME, ProcessEnd, ProcessSandbox, SandboxProcess, check_timeout
from sao_jax.sandbox.streams import OutputBudget, arriving, read_waiting, write_all

START_TIMEOUT = 60.0  # seconds for an interpreter to begin
MAX_PRINTED = 65536  # bytes of one call that its code prints; more are left out and counted
MAX_ANSWER = 262144  # bytes
DYING = 2.0  # seconds between the end of a process's pipes and its own

EndedFor = Literal["", "time", "memory", "disk", "output", "exit", "pipes"]


@dataclasses.dataclass(frozen=True)
class CodeResult:
  """The end of one call.

  Attributes:
    output: what the code wrote to standard output and error, and the value of its last expression.
    error: its traceback, short; "" if it raised nothing.
    ended_for: why the interpreter was ended or has ended, a limit, "exit" by itself, or "pipes", which it has broken;
      "" if it goes on.
    notice: what the agent has to know beside it: that variables are gone and why, or that output was left out.
    seconds: of the code, without the start of an interpreter.
  """

  output: str
  error: str
  ended_for: EndedFor
  notice: str
  seconds: float

  @property
  def failed(self) -> bool:
    """Tells if the code raised something, or the interpreter has ended."""
    return bool(self.error or self.ended_for)

  @property
  def text(self) -> str:
    """All of it, as an agent sees it."""
    parts = (self.output, self.error, self.notice)
    return "\n".join(part.rstrip("\n") for part in parts if part) or "(no output)"


class PythonSession:
  """One interpreter after another in a sandbox, which belongs to the session; to be used on one event loop.

  >>> async def count():
  ...   session = await PythonSession.start()
  ...   try:
  ...     await session.execute("n = 6", timeout=60.0)
  ...     return (await session.execute("n * 7", timeout=60.0)).text
  ...   finally:
  ...     await session.close()
  >>> asyncio.run(count())
  '42'
  """

  def __init__(self, sandbox: ProcessSandbox, *, python: str = "python3"):
    """Takes over a sandbox.

    Args:
      sandbox: closed with the session.
      python: the interpreter inside, a name or a path.
    """
    self.sandbox = sandbox
    script = pathlib.Path(python_driver.__file__).read_text(encoding="utf-8")
    self._command = [python, "-I", "-c", script]
    self._process: SandboxProcess | None = None
    self._turn = asyncio.Lock()

  @classmethod
  async def start(
    cls, start: Callable[[], Awaitable[ProcessSandbox]] = LocalSandbox.start, *, python: str = "python3"
  ) -> PythonSession:
    """Starts a sandbox and an interpreter in it; the session must be closed. A `SandboxPool` can hold sessions, too.

    Args:
      start: makes the sandbox.
      python: the interpreter inside, a name or a path.

    Raises:
      InfrastructureFailure: one of them did not start.
    """
    session = cls(await start(), python=python)
    try:
      first = await session.execute("", START_TIMEOUT)
      if first.failed:
        raise InfrastructureFailure(NAME, f"{python} does not run inside: {first.text}")
    except BaseException:
      await session.close()
      raise
    return session

  async def execute(self, code: str, timeout: float) -> CodeResult:
    """Runs a piece of code.

    Args:
      code: statements; the value of a last expression is shown.
      timeout: seconds. Code that takes longer ends with its interpreter.

    Raises:
      InfrastructureFailure: the sandbox is gone.
    """
    check_timeout(timeout)
    async with self._turn:
      try:
        process, call, ended_for, lost = await self._interpreter()
        begin = time.monotonic()
        if not ended_for:
          call = Call(code, process, self.sandbox.limits.output)
          ended_for = await call.run(timeout)
        # An interpreter that goes on is the usual end.
        if not ended_for:
          return CodeResult(call.output, call.error, "", lost + call.left_out, time.monotonic() - begin)

        # What it still wrote is read before its pipes are closed.
        end = await process.end()
        call.read_output()
        ended_for, notice = self._reason(ended_for, end, timeout)
        await self._drop()
      except BaseException:
        await asyncio.shield(asyncio.ensure_future(self.sandbox.close()))
        raise
      return CodeResult(call.output, "", ended_for, f"{lost}{notice}", time.monotonic() - begin)

  async def close(self) -> None:
    """Ends the interpreter and its sandbox; nothing happens the second time."""
    await self.sandbox.close()
    await self._drop()

  async def _interpreter(self) -> tuple[SandboxProcess, Call | None, EndedFor, str]:
    """Finds or starts a process; its start is not charged to the code.

    Returns:
      (the process, its first call if it has just started, why that has failed or "", what to say of the last process
      where that ended between two calls).
    """
    lost = ""
    if self._process is not None and self._process.ended.done():
      _, lost = self._reason("exit", await self._process.end(), 0.0)
      lost += " This call ran in a fresh one.\n"
      await self._drop()
    if self._process is not None:
      return self._process, None, "", lost
    self._process = await self.sandbox.start_process(self._command)
    first = Call("", self._process, self.sandbox.limits.output)
    return self._process, first, await first.run(START_TIMEOUT), lost

  async def _drop(self) -> None:
    if self._process is not None:
      process, self._process = self._process, None
      await process.close()

  def _reason(self, ended_for: EndedFor, end: ProcessEnd, timeout: float) -> tuple[EndedFor, str]:
    """Says why an interpreter has ended: (the reason, the notice)."""
    if ended_for in ("exit", "pipes") and end.killed_for:
      ended_for = end.killed_for
    limits = self.sandbox.limits
    reasons = {
      "time": f"The call took more than {timeout:g} s",
      "memory": f"More than {limits.memory // MIB} MiB of memory were used",
      "disk": f"More than {limits.files} files were made",
      "output": f"More than {limits.output} bytes were written",
      "exit": f"The interpreter has ended, {_status(end.exit_status)}",
      "pipes": "The call has broken the pipes of its interpreter",
    }
    return ended_for, f"Error: {reasons[ended_for]}. The interpreter is gone, with all variables."


class Call:
  """One piece of code on its way through an interpreter.

  Attributes:
    error: as of `CodeResult`.
    left_out: a notice of what was printed and left out, or "".
  """

  def __init__(self, code: str, process: SandboxProcess, most: int):
    """Prepares the call; `most` is how many bytes of output may come by any way."""
    self._process, self._word = process, secrets.token_hex(16)
    self._budget, self._written, self._answer = OutputBudget(most), bytearray(), bytearray()
    self._over = asyncio.Event()
    self.error, self.left_out = "", ""
    # As no tokenizer, the interpreter takes no half of a surrogate pair: a question mark stands there.
    code = code.encode("utf-8", "replace").decode("utf-8")
    request = {"word": self._word, "code": code, "most": min(MAX_PRINTED, most // 2)}
    self._request = json.dumps(request).encode("ascii") + b"\n"

  @property
  def output(self) -> str:
    """All that was written until now; of much more than may be printed, the beginning and the end."""
    excess = len(self._written) - 2 * MAX_PRINTED
    if excess <= 0:
      return self._written.decode("utf-8", "replace")
    head, tail = (
      part.decode("utf-8", "replace") for part in (self._written[:MAX_PRINTED], self._written[-MAX_PRINTED:])
    )
    return f"{head}\n[... {excess} bytes left out ...]\n{tail}"

  async def run(self, timeout: float) -> EndedFor:
    """Sends the code and waits for its answer; returns why the interpreter cannot go on, "" if it can."""
    # While the code is sent, whatever comes back is taken; one of three ends is waited for.
    sending = asyncio.ensure_future(write_all(os.dup(self._process.stdin), self._request))
    over = asyncio.ensure_future(self._over.wait())
    try:
      with arriving(self._process.stdout, self._take_output), arriving(self._process.stderr, self._take_answer):
        waited_for = {over, self._process.ended}
        await asyncio.wait(waited_for, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
      for task in (sending, over):
        task.cancel()
      await asyncio.gather(sending, over, return_exceptions=True)

    # The output of a call is complete in its pipe when its answer comes.
    self.read_output()
    if self._budget.exceeded.is_set():
      return "output"
    if b"\n" in self._answer:
      return self._read_answer()
    if self._over.is_set():
      await asyncio.wait({self._process.ended}, timeout=DYING)
    if self._process.ended.done():
      return "exit"
    return "pipes" if self._over.is_set() else "time"

  def read_output(self) -> None:
    """Reads what waits in the pipe of output."""
    self._written.extend(read_waiting(self._process.stdout, self._budget))

  def _take_output(self, piece: bytes) -> None:
    self._written.extend(self._budget.take(piece))
    if self._budget.exceeded.is_set():
      self._over.set()

  def _take_answer(self, piece: bytes) -> None:
    self._answer.extend(piece)
    if not piece or b"\n" in piece or len(self._answer) > MAX_ANSWER:
      self._over.set()

  def _read_answer(self) -> EndedFor:
    """Reads the answer, which is one line; anything else was not written by the driver."""
    try:
      answer = json.loads(self._answer)
      word, error, dropped = (answer[name] for name in ("word", "error", "dropped"))
    except (ValueError, KeyError, TypeError, RecursionError):
      return "pipes"
    if word != self._word or not isinstance(error, str) or not isinstance(dropped, int):
      return "pipes"
    self.error = error
    self.left_out = f"[{dropped} further bytes of output were left out]" if dropped else ""
    return ""


def _status(exit_status: int | None) -> str:
  """Describes the end of a process."""
  if exit_status is not None and -exit_status in signal.valid_signals():
    return f"by {signal.Signals(-exit_status).name}"
  return f"with exit status {exit_status}"
