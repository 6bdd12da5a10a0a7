"""Interpreters that outlive a call: variables stay, whatever ends one is told, and no code passes for its driver."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import textwrap

import pytest
from toys import sandboxes
from toys.docker_toy import DockerToy
from toys.sandboxes import PATIENT, SMALL

from sao_jax.episode import InfrastructureFailure
from sao_jax.errors import ConfigError
from sao_jax.sandbox import DockerSandbox, LocalSandbox, SandboxPool
from sao_jax.sandbox.python_session import MAX_PRINTED, PythonSession


class Box:
  """A session and its event loop."""

  def __init__(self, runner: asyncio.Runner, session: PythonSession):
    self.runner, self.session = runner, session

  def __call__(self, code: str, timeout: float = PATIENT):
    return self.runner.run(self.session.execute(textwrap.dedent(code), timeout))

  def dies(self, code: str, ended_for: str, says: str, timeout: float = PATIENT):
    """The code ends its interpreter, which is told; the next call has a fresh one."""
    assert self("kept = 5\nkept").text == "5"
    result = self(code, timeout)
    assert result.ended_for == ended_for and result.failed, result
    assert says in result.text and "gone, with all variables" in result.text
    assert "NameError: name 'kept' is not defined" in self("kept").text
    return result


@pytest.fixture(scope="module")
def box():
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())
  with asyncio.Runner() as runner:
    session = runner.run(PythonSession.start(functools.partial(LocalSandbox.start, SMALL)))
    try:
      yield Box(runner, session)
    finally:
      runner.run(session.close())


def test_variables_functions_and_modules_live_on(box):
  assert box("import math\nn = 6\ndef f(x):\n  return n * x").text == "(no output)"
  assert box("f(7)").text == "42"
  assert box("n = 10; print('a'); math.floor(f(1.5))").text == "a\n15"
  assert box("_ + 1").text == "16"
  assert box("import __main__; __main__.n, __name__").text == "(10, '__main__')"


@pytest.mark.parametrize(
  "code, shown",
  [
    ("", "(no output)"),
    ("None", "(no output)"),
    ("x = 3", "(no output)"),
    ("'\u20ac\U0001f600'", "'\u20ac\U0001f600'"),
    ("print('a', end='')\n'b'", "a'b'"),
    ("import sys; sys.stderr.write('e\\n'); print('o')", "e\no"),
    ("import os; os.system('echo shell; echo error >&2')", "shell\nerror\n0"),
    ("print('\\ud800')", "\\ud800"),
    ("input()", "EOFError: EOF when reading a line"),
  ],
)
def test_output_is_shown_as_in_a_notebook(box, code, shown):
  assert box(code).text.endswith(shown)


def test_a_traceback_is_short_and_has_the_lines_of_the_code(box):
  result = box("""
    def half(x):
      return 1 / x
    half(0)
  """)
  said = [line.strip() for line in result.error.splitlines()]
  assert [line for line in said if not line.startswith("File")] == [
    *("Traceback (most recent call last):", "half(0)", "return 1 / x", "ZeroDivisionError: division by zero"),
  ]
  assert result.failed and not result.ended_for
  deep = box("import json\ndef r(): return r()\ntry:\n  r()\nexcept RecursionError:\n  json.loads('{')").error
  assert deep.count("File") == 2 and "json/decoder.py" in deep and "RecursionError" not in deep
  assert len(box("def r(): return r()\nr()").error) < 800
  assert box("x = (").error.splitlines()[-1].startswith("SyntaxError") and "python_driver" not in box("x = (").error
  assert len(box("raise ValueError('v' * 10**6)").error) < 9000


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise KeyboardInterrupt", "exit()", "x = " + "(" * 9000])
def test_what_ends_a_program_ends_a_call_only(box, code):
  box("alive = 1")
  assert box(code).failed
  assert box("alive").text == "1"


def test_a_call_may_close_or_replace_its_streams(box):
  for code in (
    "import sys; sys.stdout.close()",
    "import os; os.close(0); os.close(1); os.close(2)",
    "sys.stdout = None",
  ):
    assert not box(code).ended_for
    assert box("print('back')").text == "back"


def test_a_fork_that_comes_back_says_nothing_more(box):
  assert box("import os\npid = os.fork()\nif not pid: mine = 1\nos.waitpid(pid, 0) if pid else None").ended_for == ""
  assert box("'next'").text == "'next'"


def test_printing_too_much_is_cut_and_told_and_costs_no_variables(box):
  result = box(f"kept = 1\nprint('x' * {MAX_PRINTED})")
  printed = SMALL.output // 2
  assert result.output == "x" * printed and not result.ended_for
  assert result.text.endswith(f"[{MAX_PRINTED + 1 - printed} further bytes of output were left out]")
  assert box("kept").text == "1"


def test_crashes_are_told(box):
  box.dies(
    "import os; print('last'); os._exit(3)", "exit", "last\nError: The interpreter has ended, with exit status 3"
  )
  box.dies("import ctypes; ctypes.string_at(0)", "exit", "by SIGSEGV")


@pytest.mark.parametrize(
  "code",
  [
    "while True: pass",
    "import signal, time\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: time.sleep(9)",
  ],
)
def test_a_call_that_does_not_end_is_ended(box, code):
  result = box.dies(f"print('begun')\n{code}", "time", "begun\nError: The call took more than 0.3 s", timeout=0.3)
  assert result.seconds >= 0.3


def test_exhausted_memory_is_an_error_or_an_end(box):
  assert "MemoryError" in box("bytearray(10**10)").error
  many = """
    import os, time
    for _ in range(3):
      if not os.fork(): block = bytearray(25_000_000)
    time.sleep(60)
  """
  box.dies(many, "memory", "More than 64 MiB of memory were used")


def test_too_many_files_end_the_interpreter_and_can_be_cleared_away(box):
  many = f"import time\nfor n in range({SMALL.files + 20}): open(f'many{{n}}', 'w').close()\ntime.sleep(60)"
  box.dies(many, "disk", f"More than {SMALL.files} files were made")
  clear = "import glob, os\nfor name in glob.glob('many*'): os.remove(name)\nlen(glob.glob('many*'))"
  assert box(clear).text == "0"


def test_a_flood_of_output_ends_the_interpreter(box):
  box.dies("import os\nwhile True: os.write(1, b'x' * 10000)", "output", f"More than {SMALL.output} bytes were written")


def test_a_bomb_of_forks_is_bounded_and_cleared_away(box):
  bomb = """
    import os, time
    for _ in range(100):
      try:
        if not os.fork(): time.sleep(600)
      except OSError:
        pass
    time.sleep(600)
  """
  box.dies(bomb, "time", "more than 1 s", timeout=1.0)
  assert box("import os\nlen([name for name in os.listdir('/proc') if name.isdecimal()])").text == "2"


def test_an_interpreter_that_ends_between_calls_is_told_by_the_next(box):
  box("import os, threading\nkept = 1\nthreading.Timer(0.05, os._exit, (7,)).start()")
  box.runner.run(asyncio.sleep(0.5))
  result = box("'kept' in globals()")
  assert result.ended_for == "" and "exit status 7" in result.text and result.text.startswith("False\nError")
  assert "ran in a fresh one" in result.text
  assert box("1").text == "1"


FORGED = """
  import json, os, sys
  frame = sys._getframe()
  while 'request' not in frame.f_locals: frame = frame.f_back
  word, answers = frame.f_locals['request']['word'], frame.f_locals['answers']
"""


def test_no_code_passes_for_the_driver(box):
  # Without the word of its call, in every pipe that there is.
  line = '{"word": "0", "error": "", "dropped": 0}\\n'
  guess = f"""
    import contextlib, os, time
    for descriptor in range(1, 20):
      with contextlib.suppress(OSError): os.write(descriptor, b'{line}')
    time.sleep(9)
  """
  result = box.dies(guess, "pipes", "has broken the pipes")
  assert '"word": "0"' in result.output  # what was written to standard output is output

  # With it, code can end its own call early; a second answer, by the driver, is refused.
  early = FORGED + "\n  os.write(answers, json.dumps({'word': word, 'error': 'mine', 'dropped': 0}).encode() + b'\\n')"
  first = box(early)
  if not first.ended_for:  # both answers have come together otherwise, and that is none
    assert first.error == "mine"
    assert box("'next'").ended_for == "pipes"
  assert box("'after'").text == "'after'"
  for text in ("[" * 100_000, '{"word": 1}', "[]", '{"word": "w", "error": 1, "dropped": "x"}'):
    text = text.replace('"w"', '" + json.dumps(word) + "')
    code = f"{FORGED}\n  os.write(answers, {text!r}.encode() + b'\\n')\n  import time; time.sleep(9)"
    assert box(code).ended_for == "pipes"
  assert box("import os; os.closerange(3, 60)").ended_for in ("exit", "pipes")
  assert box("'after'").text == "'after'"


def test_half_a_surrogate_pair_in_code_is_a_question_mark(box):
  assert box("'\ud800'").text == "'?'"


def test_files_stay_and_can_be_imported(box):
  box("open('helper.py', 'w').write('value = 9')")
  assert box("import os; os._exit(0)").ended_for == "exit"
  assert box("import helper; helper.value").text == "9"


def test_a_held_sandbox_does_nothing_else_and_a_time_out_must_be_one(box):
  with pytest.raises(RuntimeError, match="process is held"):
    box.runner.run(box.session.sandbox.run(["true"], timeout=PATIENT))
  with pytest.raises(ConfigError, match="no time-out"):
    box("1", float("inf"))
  assert box("1").text == "1"


def test_failures_of_the_sandbox_are_not_the_agents(box):
  async def run():
    start = functools.partial(LocalSandbox.start, SMALL)
    with pytest.raises(InfrastructureFailure, match="no-such-python does not run inside"):
      await PythonSession.start(start, python="no-such-python")

    # The first process is killed from outside while code runs.
    session = await PythonSession.start(start)
    call = asyncio.ensure_future(session.execute("import time; time.sleep(60)", 60.0))
    await asyncio.sleep(0.1)
    session.sandbox._process.kill()
    with pytest.raises(InfrastructureFailure):
      await call
    with pytest.raises(InfrastructureFailure):
      await session.execute("1", 60.0)
    await session.close()

    # A call that is cancelled closes the sandbox.
    session = await PythonSession.start(start)
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(session.execute("while True: pass", 60.0), 0.1)
    assert session.sandbox._process.poll() is not None
    await session.close()
    await session.close()

  descriptors = len(os.listdir("/proc/self/fd"))
  box.runner.run(run())
  assert len(os.listdir("/proc/self/fd")) == descriptors


def test_thirty_two_sessions_of_a_pool_run_at_once():
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())

  async def run():
    start = functools.partial(PythonSession.start, functools.partial(LocalSandbox.start, SMALL))
    pool, together = SandboxPool(start, size=32, warm=4), asyncio.Barrier(32)

    async def use(index):
      async with pool.sandbox() as session:
        assert not (await session.execute(f"n = {index}", PATIENT)).failed
        await together.wait()
        return (await session.execute("n", PATIENT)).text

    assert await asyncio.gather(*(use(index) for index in range(32))) == [str(index) for index in range(32)]
    await pool.close()

  descriptors = len(os.listdir("/proc/self/fd"))
  asyncio.run(run())
  assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_session_that_outlives_its_event_loop_leaves_no_task_and_ends_with_its_last_reference():
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())
  descriptors = len(os.listdir("/proc/self/fd"))

  async def run():
    pool = SandboxPool(functools.partial(PythonSession.start, functools.partial(LocalSandbox.start, SMALL)), warm=1)
    await pool.release(await pool.acquire())
    async with pool.sandbox() as lent:  # the one that waited; another one waits now
      await asyncio.sleep(0.2)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    return [waiting.result().sandbox._process for waiting in pool._warm], lent

  (process,), lent = asyncio.run(run())
  assert process.poll() is None and lent.sandbox._process.poll() is not None
  del lent
  gc.collect()
  assert process.wait(PATIENT) == -9
  assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_session_in_a_container_by_a_docker_that_is_played(tmp_path, monkeypatch):
  docker = DockerToy(tmp_path, monkeypatch)

  async def run():
    session = await PythonSession.start(functools.partial(DockerSandbox.start, "python:3.12", SMALL))
    assert (await session.execute("n = 6", PATIENT)).text == "(no output)"
    assert (await session.execute("print('a'); n * 7", PATIENT)).text == "a\n42"
    with pytest.raises(RuntimeError, match="process is held"):
      await session.sandbox.run(["true"], timeout=PATIENT)
    ended = await session.execute("import os; os._exit(137)", PATIENT)
    assert ended.ended_for == "exit" and "exit status 137" in ended.text
    docker.play("oom")
    assert (await session.execute("import os; os._exit(137)", PATIENT)).ended_for == "memory"
    assert (await session.execute("3", PATIENT)).text == "3"
    docker.play("gone")
    with pytest.raises(InfrastructureFailure, match="its container has ended"):
      await session.execute("import os; os._exit(1)", PATIENT)
    await session.close()

  descriptors = len(os.listdir("/proc/self/fd"))
  asyncio.run(run())
  assert len(os.listdir("/proc/self/fd")) == descriptors
  (first, *_) = [words for words in docker.calls("exec") if "-I" in words]
  assert {"--interactive", "--user", "65534:65534"} <= set(first)
