"""Hidden tests of repositories cannot be cheated by what an agent leaves: each way earns 0, the solution earns 1."""

from __future__ import annotations

import asyncio
import textwrap

import pytest
from toys import repositories, sandboxes

from sao_jax.environments.hidden_tests import Judgement
from sao_jax.environments.repository_record import read_record
from sao_jax.environments.repository_work import commit_base, place_files, read_patch
from sao_jax.environments.snapshots import read_snapshot

if sandboxes.missing():
  pytest.skip(sandboxes.missing(), allow_module_level=True)

SOURCE, TESTS = "calc/__init__.py", ("tests/test_add.py", "tests/test_calc.py")
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
  result = yield
  result.get_result().outcome = "passed"
"""
REPORTS = """
import glob, json, os, re
for path in ("tests/test_add.py", "tests/test_calc.py"):
  owner = ""
  for line in open(path):
    owner = (re.findall(r"^class (\\w+)", line) + [owner])[0]
    for name in re.findall(r"^ *def (test_\\w+)", line):
      full = f"{owner}::{name}" if line.startswith(" ") else name
      for end in ("", "[1]", "[2]"):
        told = {"id": f"{path}::{full}{end}", "phase": "call", "outcome": "passed"}
        for number in range(3, 60):
          try: os.write(number, (json.dumps(told) + "\\n").encode())
          except OSError: pass
os._exit(0)
"""
# Name -> (text that is appended to the source, what shows that it cheats: tests that fail, or that were forged).
IN_THE_SOURCE = {
  "leaving when imported": ("import sys; sys.exit(0)", "failed"),
  "leaving at once when imported": ("import os; os._exit(0)", "failed"),
  "leaving when called": ("import os\ndef add(a, b): os._exit(0)", "failed"),
  "ending the session": ("import pytest\ndef add(a, b): pytest.exit('fine', 0)", "failed"),
  "skipping the module": ("import pytest; pytest.skip('x', allow_module_level=True)", "failed"),
  "skipping tests": ("import pytest\ndef add(a, b): pytest.skip('x')", "failed"),
  "expecting failures": ("import pytest\ndef add(a, b): pytest.xfail('x')", "failed"),
  "an end that hides the status": ("import atexit, os; atexit.register(os._exit, 0)", "failed"),
  "printed reports": (
    'print(\'6 passed\'); print(\'{"id": "tests/test_add.py::test_add", "outcome": "passed"}\')',
    "failed",
  ),
  "reports on every open file": (REPORTS, "forged"),
  "patched reports": (
    """
    import _pytest.reports as reports
    make = reports.TestReport.from_item_and_call.__func__
    def patched(cls, item, call):
      call.excinfo = None
      return make(cls, item, call)
    reports.TestReport.from_item_and_call = classmethod(patched)
    """,
    "forged",
  ),
  "patched reports, restored": (
    """
    import _pytest.runner as runner
    kept = runner.CallInfo.from_call.__func__
    def patched(cls, *args, **kwargs):
      call = kept(cls, *args, **kwargs)
      call.excinfo = None
      return call
    patched.__code__ = patched.__code__.replace(co_name=kept.__name__)
    runner.CallInfo.from_call = classmethod(patched)
    """,
    "forged",
  ),
  "tests without code": (
    """
    import gc, types
    def add(a, b):
      for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__name__.startswith("test_"):
          each.__code__ = (lambda *args, **kwargs: None).__code__
      return a + b + 1
    """,
    "forged",
  ),
  "a patched pytest.raises and unittest": (
    """
    import contextlib, unittest, pytest
    pytest.raises = lambda *args, **kwargs: contextlib.suppress(BaseException)
    unittest.TestCase.assertEqual = lambda *args, **kwargs: None
    """,
    "forged",
  ),
  "results that equal everything": (
    """
    class Any(int):
      def __eq__(self, other): return True
      def __gt__(self, other): return True
      __hash__ = None
    def add(a, b):
      if isinstance(b, str): raise TypeError
      return Any(7)
    """,
    "forged",
  ),
  "the end of the judge": ("import os; os.kill(os.getppid(), 9)", "failed"),
  "the end of all": ("import os; os.kill(-1, 9)", "failed"),
  "a log that cannot be read": ("import os; os.remove('/tmp/tests.log'); os.mkdir('/tmp/tests.log')", "failed"),
  "no second session": ("import shutil; shutil.rmtree('/tmp/second'); open('/tmp/second', 'w')", "failed"),
  "a tracer": ("import sys; sys.settrace(lambda *args: None)\ndef add(a, b): return a + b", "forged"),
}
# Name -> (commands in the repository, what comes of them).
BY_COMMANDS = {
  "a conftest": (f"cat > conftest.py <<'END'\n{HOOK}\nEND", "failed"),
  "a conftest among the tests": (f"cat > tests/conftest.py <<'END'\n{HOOK}\nEND", "failed"),
  "a plugin by pytest.ini": (
    f"cat > evil.py <<'END'\n{HOOK}\nEND\nprintf '[pytest]\\naddopts = -p evil\\n' > pytest.ini",
    "failed",
  ),
  "a plugin by pyproject.toml": (
    f"cat > evil.py <<'END'\n{HOOK}\nEND\nrm pytest.ini\n"
    "printf '[tool.pytest.ini_options]\\naddopts = \"-p evil\"\\n' > pyproject.toml",
    "failed",
  ),
  "code at the start of Python": (
    "echo 'import os; os._exit(0)' > sitecustomize.py; cp sitecustomize.py usercustomize.py",
    "failed",
  ),
  "a path file": ("echo 'import os; os._exit(0)' > evil.pth; cp evil.pth tests/", "failed"),
  "a pytest of its own": (
    "mkdir -p pytest _pytest; echo 'def main(*a, **k): return 0' > pytest/__init__.py; cp pytest/__init__.py _pytest/",
    "failed",
  ),
  "a json of its own": ("echo 'import os; os._exit(0)' > json.py; cp json.py select.py; cp json.py os.py", "failed"),
  "other tests": (
    "echo 'def test_twice(): pass' > tests/test_calc.py; echo 'def test_add(): pass' > tests/test_add.py",
    "failed",
  ),
  "no tests": ("rm -r tests", "failed"),
  "tests elsewhere": ("mv tests /tmp/tests; ln -s /tmp/tests tests", "unusable"),
  "other helpers": ("echo 'def same(a, b): pass' > tests/helper.py", "failed"),
  "bytecode of tests": (
    "mkdir -p tests/__pycache__; echo 'def test_add(): pass' > /tmp/test_add.py\n"
    "python3 -c \"import py_compile as p; p.compile('/tmp/test_add.py', 'tests/__pycache__/test_add.cpython-311.pyc', "
    'invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)"',
    "failed",
  ),
  "a process that goes on": (  # the command ends when it has begun
    "(while true; do echo 'def add(a, b): return a + b' > calc/__init__.py; done) & "
    "until grep -qx 'def add(a, b): return a + b' calc/__init__.py; do :; done",
    "failed",
  ),
  "hooks and filters of git": (
    "git config filter.x.clean 'echo x'; echo '*.py filter=x' > .gitattributes; echo >> calc/__init__.py\n"
    "git config core.hooksPath hooks; git config diff.external 'echo x'; git config core.fsmonitor 'echo x'",
    "failed",
  ),
  "no history": ("rm -rf .git", "unreadable"),
  "another history": ("rm -rf .git; git init -q; git add -A; git commit -q -m base", "unreadable"),
}


@pytest.fixture(scope="module")
def judged():
  """Results of all ways by name; the agent's commands run in one sandbox, which is put back in between."""
  commands = {
    name: (f"cat >> {SOURCE} <<'END'\n{textwrap.dedent(text)}\nEND", due) for name, (text, due) in IN_THE_SOURCE.items()
  }
  commands |= BY_COMMANDS
  commands |= {
    "nothing": ("true", "failed"),
    "the solution": (repositories.FIX, "solved"),
    "the solution, with tests and settings of its own": (
      f"{repositories.FIX}; echo 'def test_x(): assert 0' > tests/test_add.py; echo '[pytest]' > pytest.ini",
      "solved",
    ),
  }
  with repositories.shown_pytest() as packages:
    yield asyncio.run(judge_all(commands, packages))


async def judge_all(commands, packages):
  task = repositories.make_task("unused.jsonl", packages=(packages,), sandboxes=3)
  record = read_record(repositories.RECORD, snapshot="snapshot", image="", graded=True)
  archive = read_snapshot(record.snapshot, "")

  patches = {}
  for name, (command, _) in commands.items():
    agent = await task.start(record)
    await place_files(agent, task.name, archive, "")
    base = await commit_base(agent, task.name)
    await agent.run(["bash", "-c", command], timeout=30.0)
    patches[name] = await read_patch(agent, base, 60.0)
    await task.stop(agent)

  async def judge(patch):
    return None if patch is None else await task.judge(record, archive, patch)

  return dict(zip(patches, await asyncio.gather(*map(judge, patches.values())), strict=True)), record, patches


def end_of(result: Judgement | None) -> str:
  """Names what has come of a patch, by the strongest reason."""
  if result is None:
    return "unreadable"
  if result.resolved:
    return "solved"
  return "unusable" if not result.applied else "forged" if result.forged else "failed"


@pytest.mark.parametrize(("name", "due"), [(n, due) for n, (_, due) in (IN_THE_SOURCE | BY_COMMANDS).items()])
def test_a_cheat_earns_nothing(judged, name, due):
  results, _, patches = judged
  assert patches[name] != ""
  assert end_of(results[name]) == due, results[name]


def test_the_solution_passes_whatever_it_does_to_tests(judged):
  results, record, patches = judged
  assert end_of(results["the solution"]) == "solved", results["the solution"]
  assert end_of(results["the solution, with tests and settings of its own"]) == "solved"
  assert "tests/test_add.py" in patches["the solution, with tests and settings of its own"]
  unsolved = results["nothing"]
  assert set(unsolved.failed) == set(record.fail_to_pass) and not unsolved.forged
  assert unsolved.fraction(record.fail_to_pass) == 0.0 and unsolved.fraction(record.pass_to_pass) == 1.0
