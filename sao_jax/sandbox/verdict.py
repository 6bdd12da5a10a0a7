"""Hidden tests of what an agent has left in its sandbox: they pass by saying a word that only this run knows.

An exit status proves nothing, since `sys.exit(0)` gives it before any test. Tests enter by standard input, never as a
file; what is tested runs in processes of its own, which cannot look into the one that knows the word.
"""

from __future__ import annotations

import dataclasses
import pathlib
import secrets

from sao_jax.errors import ConfigError
from sao_jax.sandbox import tests_prelude
from sao_jax.sandbox.contract import CommandResult, Sandbox


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The end of a graded run.

  Attributes:
    passed: the tests ran to their end, and none of them raised.
    result: of the process with the tests; its output may show hidden values, and is not for the agent.
  """

  passed: bool
  result: CommandResult


async def graded_run(sandbox: Sandbox, tests: str, *, timeout: float, python: str = "python3") -> Verdict:
  """Runs hidden tests on the work folder of a sandbox.

  >>> tests = "assert call('solution', 'add', 2, 3) == 5"  # the function add of solution.py, in a process of its own

  Args:
    sandbox: with the agent's files. Nothing of the agent's runs in it any more: calls leave nothing behind.
    tests: the text of a Python program that raises unless all is well. `call` and `program` of `tests_prelude` are
      there. It must not import the agent's code: that could patch whatever judges it.
    timeout: seconds for all of them together.
    python: the interpreter inside.

  Raises:
    ConfigError: the tests cannot be parsed; that is not the agent's fault.
    InfrastructureFailure: the sandbox is gone.
  """
  nonce = secrets.token_hex(16)
  prelude = pathlib.Path(tests_prelude.__file__).read_text(encoding="utf-8")
  # The interpreter reads all of it before the first line runs: nothing is left in standard input.
  text = f"{prelude}\nhide_from_others()\n{tests}\nimport os\nos.write(1, b'\\n{nonce}\\n')\n"
  try:
    compile(text, "tests", "exec", dont_inherit=True)  # as a whole: a `from __future__` in the middle is none
  except (SyntaxError, ValueError, RecursionError) as error:
    raise ConfigError("tests", f"they are no Python program: {error}.", "Correct them.") from error
  result = await sandbox.run([python, "-I", "-"], stdin=text.encode("utf-8"), timeout=timeout)
  said = nonce.encode("ascii") in result.stdout.splitlines()
  return Verdict(result.exit_status == 0 and said, result)
