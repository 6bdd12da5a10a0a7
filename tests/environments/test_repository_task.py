"""A repository task from its record to the reward: real git, a real sandbox, hidden tests that nobody sees before."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import subprocess
import time

import pytest
from toys import repositories, sandboxes
from toys.docker_toy import DockerToy
from toys.paths import REPOSITORY

from configs.repository import get_config as small_repositories_config
from sao_jax.config import RolloutConfig, RunConfig
from sao_jax.configuration.tool_relations import tool_relations
from sao_jax.environments.base import check_step_result
from sao_jax.environments.episode_texts import KeepTexts
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.environments.repository_record import read_record, touched_paths
from sao_jax.environments.repository_task import RepositoryTask
from sao_jax.environments.repository_work import commit_base, place_files
from sao_jax.environments.snapshots import read_snapshot
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.episode import BadPrompt, GraderFailure, Status
from sao_jax.errors import ConfigError
from sao_jax.gateway.agent import Agent

needs_sandbox = pytest.mark.skipif(bool(sandboxes.missing()), reason=sandboxes.missing())
# A task whose tests need no package: one file, one test.
FILES = {
  "m.py": "def add(a, b):\n  return a - b\n",
  "test_m.py": "from m import add\n\n\ndef test_zero():\n  assert add(3, 0) == 3\n",
}
HIDDEN = "from m import add\n\n\ndef test_sum_4711():\n  assert add(2, 3) == 5\n"
RECORD = {
  "instance_id": "toy__m-1",
  "base_commit": "",
  "problem_statement": "2+3",
  "snapshot": FILES,
  "test_patch": repositories.new_file("test_hidden.py", HIDDEN),
  "patch": "--- a/m.py\n+++ b/m.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-  return a - b\n+  return a + b\n",
  "FAIL_TO_PASS": ["test_hidden.py::test_sum_4711"],
  "PASS_TO_PASS": ["test_m.py::test_zero"],
}
FIX = "bash sed -i 's/a - b/a + b/' m.py"


def make_task(folder, *records, **settings):
  return repositories.make_task(
    repositories.write_records(folder, *(records or (RECORD,))), tests="functions", **settings
  )


def play(task, *turns, cut=False):
  """Plays scripted turns; returns (observations as text, the last result or the reward of the cut, kept texts)."""
  kept = []

  async def run():
    spec = KeepTexts(task, lambda prompt, texts, reward: kept.append((texts, reward)))
    tokenizer = task.tokenizer()
    episode = spec.make(tokenizer)
    prompt = task.prompts(tokenizer, "train", 0)[0]
    seen = []
    try:
      seen.append(tokenizer.decode(await episode.reset(prompt)))
      for turn in turns:
        result = await episode.step(tokenizer.encode_with_specials(f"{turn}<|end|>"))
        check_step_result(result, environment=task.name, vocab_size=tokenizer.vocab_size)
        seen.append(tokenizer.decode(result.observation))
      return seen, await episode.on_truncated(Status.TRUNCATED_TURNS) if cut else result
    finally:
      await episode.close()
      await episode.close()

  return *asyncio.run(run()), kept


@needs_sandbox
def test_an_episode_looks_edits_and_is_judged_by_tests_that_it_could_not_see(tmp_path):
  search = (
    "grep -rls '4[7]11' . /tmp /dev/shm /etc /proc/[0-9]*/cmdline /proc/[0-9]*/environ; git log --all --oneline | wc -l"
  )
  seen, result, kept = play(
    make_task(tmp_path),
    "<|tool_call|>bash cat m.py; ls<|tool_call|>nothing",
    f"<|tool_call|>bash {search}",
    f"<|tool_call|>{FIX}<|tool_call|>bash exit 3",
    "Done.",
  )
  assert seen[0].endswith("<|user|>2+3<|end|><|assistant|>")
  assert "return a - b\nm.py\ntest_m.py" in seen[1] and "there is no tool 'nothing'" in seen[1]
  assert seen[2] == "<|observation|>1<|end|><|assistant|>"
  assert "[exit status 3]" in seen[3]
  assert result.done and result.reward == 1.0
  facts = {"turns": 4, "tool_calls": 5, "tool_errors": 1, "resolved": 1, "fail_to_pass": 1, "pass_to_pass": 1}
  facts |= {"patch_lines": 2, "patch_readable": 1, "patch_applied": 1, "tests_forged": 0}
  assert {name: result.info[name] for name in facts} == facts
  ((texts, reward),) = kept
  assert reward == 1.0 and texts["instance_id"] == "toy__m-1"
  assert touched_paths(texts["model_patch"]) == ("m.py",) and "+  return a + b" in texts["model_patch"]


@needs_sandbox
def test_submit_ends_it_and_what_is_unsolved_or_untouched_earns_nothing(tmp_path):
  task = make_task(tmp_path)
  edit = {"command": "str_replace", "path": "/workspace/m.py", "old_str": "a - b", "new_str": "a * b"}
  seen, result, kept = play(task, f"<|tool_call|>str_replace_editor {json.dumps(edit)}", "<|tool_call|>submit {}")
  assert "     2\t  return a * b" in seen[1]
  assert result.done and result.reward == 0.0 and (result.info["fail_to_pass"], result.info["pass_to_pass"]) == (0, 0)
  _, result, kept = play(task, "I give up.")
  assert result.reward == 0.0 and kept == [({"instance_id": "toy__m-1", "model_patch": ""}, 0.0)]
  assert result.info["pass_to_pass"] == 1.0 and result.info["patch_lines"] == 0.0
  _, reward, kept = play(task, f"<|tool_call|>{FIX}", cut=True)
  assert reward == 1.0 and "a + b" in kept[0][0]["model_patch"]


@needs_sandbox
def test_the_editor_views_creates_replaces_and_inserts_and_says_what_cannot_be_done(tmp_path):
  def call(**arguments):
    return f"<|tool_call|>str_replace_editor {json.dumps(arguments)}"

  steps = (
    (call(command="view", path="."), "./m.py\n./test_m.py"),
    (call(command="view", path="m.py", view_range=[2, -1]), "     2\t  return a - b\n     3\t"),
    (call(command="view", path="m.py", view_range=[4, 5]), "the file has 3"),
    (call(command="view", path="/etc/passwd"), "lies outside of /workspace"),
    (call(command="view", path="no.py"), "No such file"),
    (call(command="create", path="new/n.py", file_text="x = 1\n"), "new/n.py was created."),
    (call(command="create", path="m.py", file_text=""), "is there already"),
    (call(command="insert", path="new/n.py", insert_line=1, new_str="y = 2"), "     1\tx = 1\n     2\ty = 2"),
    (call(command="insert", path="new/n.py", insert_line=9, new_str="y"), "a number from 0 to 2"),
    (call(command="str_replace", path="m.py", old_str="a", new_str="c"), "is found 3 times"),
    (call(command="str_replace", path="m.py", old_str="z"), "is not found"),
    (call(command="str_replace", path="m.py"), "needs old_str"),
    (call(command="undo", path="m.py"), "there is no command 'undo'"),
  )
  seen, result, _ = play(make_task(tmp_path), *(turn for turn, _ in steps), cut=True)
  for (turn, due), shown in zip(steps, seen[1:], strict=True):
    assert due in shown, turn


@needs_sandbox
def test_long_output_is_cut_and_a_command_that_hangs_is_killed(tmp_path):
  task = dataclasses.replace(make_task(tmp_path), max_output_tokens=64, call_timeout=0.5)
  seen, _, _ = play(task, "<|tool_call|>bash seq 1000", "<|tool_call|>bash echo a; sleep 60", cut=True)
  assert "tokens left out" in seen[1] and len(seen[1]) < 120
  assert "a\n[killed after 0.5 s]" in seen[2]


@needs_sandbox
def test_slow_commands_of_one_turn_and_filters_of_git_do_not_get_rid_of_an_episode(tmp_path):
  """They share one time, and the patch has its own: else the environment's time-out would discard the episode."""
  task = dataclasses.replace(make_task(tmp_path), call_timeout=1.0, test_timeout=1.0)
  slow = "<|tool_call|>bash sleep 9"
  seen, _, _ = play(task, slow * 4, cut=True)
  assert seen[1].count("[killed after 1 s]") == 1 and seen[1].count("not run, since") == 3

  commands = "git config filter.x.clean 'sleep 9'; echo '* filter=x' > .gitattributes; touch m.py; echo x >> m.py"
  began = time.monotonic()
  task = dataclasses.replace(task, call_timeout=30.0)
  _, result, _ = play(task, f"<|tool_call|>bash {commands}", "done")
  assert result.reward == 0.0 and result.info["patch_readable"] == 0.0 and time.monotonic() - began < 8.0


@needs_sandbox
def test_records_are_checked_with_the_known_patch_and_without(tmp_path):
  async def check(**changes):
    task = make_task(tmp_path)
    return await task.check_record(read_record(RECORD | changes, snapshot="snapshot", image="", graded=True))

  assert asyncio.run(check()) == ""
  both = ["test_hidden.py::test_sum_4711", "test_m.py::test_zero"]
  assert asyncio.run(check(FAIL_TO_PASS=both, patch="")) == (
    "test_m.py::test_zero pass before the problem is solved; test_hidden.py::test_sum_4711 fail with the patch"
  )
  late = HIDDEN.replace("  assert", "  if 1:\n    return\n  assert")
  assert "interferes" in asyncio.run(check(test_patch=repositories.new_file("test_hidden.py", late)))
  with pytest.raises(BadPrompt, match="does not fit its base commit"):
    asyncio.run(check(test_patch=RECORD["patch"].replace("a - b", "a / b")))
  with pytest.raises(GraderFailure, match="pytest cannot be imported"):
    asyncio.run(
      dataclasses.replace(make_task(tmp_path), tests="pytest").check_record(
        read_record(RECORD, snapshot="snapshot", image="", graded=True)
      )
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
  """A repository whose next commit has the fix, with tags, a branch, a stash of it, and notes; and the base's id."""
  folder = tmp_path_factory.mktemp("repository")

  def git(*words):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

  git("init", "-q", "-b", "main")
  (folder / "m.py").write_text(FILES["m.py"])
  (folder / ".gitignore").write_text("kept.txt\n")
  (folder / ".gitattributes").write_text("m.py export-ignore\n*.py filter=broken\n")
  (folder / "kept.txt").write_text("tracked, though ignored")
  (folder / "run.sh").write_text("echo ran")
  (folder / "run.sh").chmod(0o755)
  (folder / "link").symlink_to("m.py")
  git("add", "-A", "-f")
  git("commit", "-q", "-m", "base")
  base = git("rev-parse", "HEAD")
  (folder / "m.py").write_text("fixed_4711 = 1\n")
  git("commit", "-q", "-a", "-m", "fix 4711")
  git("tag", "v2")
  git("branch", "fix")
  git("bundle", "create", "-q", str(folder / "all.bundle"), "--all")
  return folder, base


@needs_sandbox
def test_the_base_commit_comes_without_the_future(repository, box_of_files):
  folder, base = repository
  archive = read_snapshot("all.bundle", base, str(folder))
  assert read_snapshot(str(folder), base) == archive == read_snapshot(str(folder / ".git"), base[:12])
  box = box_of_files(archive)
  assert box.run("sh", "-c", "cat m.py kept.txt; ./run.sh; readlink link; cat .gitattributes").stdout.decode() == (
    f"{FILES['m.py']}tracked, though ignoredran\nm.py\nm.py export-ignore\n*.py filter=broken\n"
  )
  objects = "git cat-file --batch-all-objects --batch-check | grep -c commit; git for-each-ref; git stash list"
  assert (
    box.run("sh", "-c", f"{objects}; git reflog | wc -l; git fsck --lost-found").stdout.decode().split("\n")[0] == "1"
  )
  assert box.run("sh", "-c", "git log --all --reflog --format=%s").stdout == b"base\n"
  every = "git cat-file --batch-all-objects --batch | grep -c 4711; grep -rc 4711 . | grep -v :0"
  assert box.run("sh", "-c", every).stdout == b"0\n"


@pytest.fixture
def box_of_files():
  """Makes a sandbox with the files of an archive, committed."""
  with sandboxes.open_box(repositories.LIMITS) as box:

    def fill(archive):
      box(place_files(box.sandbox, "toy", archive, ""))
      box(commit_base(box.sandbox, "toy"))
      return box

    yield fill


def test_snapshots_are_folders_archives_and_mappings_too(tmp_path, repository):
  (tmp_path / "plain" / "sub").mkdir(parents=True)
  (tmp_path / "plain" / "sub" / "m.py").write_text("x = 1\n")
  subprocess.run(["tar", "-czf", tmp_path / "a.tar.gz", "-C", tmp_path / "plain", "."], check=True)
  assert (
    read_snapshot("plain", "", str(tmp_path))
    == read_snapshot("a.tar.gz", "", str(tmp_path))
    == read_snapshot({"sub/m.py": "x = 1\n"}, "")
  )
  folder, _ = repository
  for source, commit, problem in (
    (None, "", "neither a path nor a mapping"),
    ("missing", "", "is not there"),
    ({"../m.py": ""}, "", "outside of it"),
    (str(folder), "0" * 40, "Not a valid object name"),
    (str(folder), "--help", "is no commit"),
    (str(folder), "", "is no commit"),
  ):
    with pytest.raises(BadPrompt, match=problem):
      read_snapshot(source, commit, str(tmp_path))


@needs_sandbox
def test_damaged_records_are_skipped_and_settings_that_cannot_work_are_refused(tmp_path):
  for changes, problem in (
    ({"FAIL_TO_PASS": []}, "no test in FAIL_TO_PASS"),
    ({"FAIL_TO_PASS": "no list"}, "no list of tests"),
    ({"PASS_TO_PASS": [1]}, "no list of tests"),
    ({"problem_statement": 7}, "is no text"),
  ):
    with pytest.raises(BadPrompt, match=problem):
      read_record(RECORD | changes, snapshot="snapshot", image="", graded=True)
  task = make_task(tmp_path, RECORD, {"instance_id": "lacks the rest"})
  prompts = task.prompts(task.tokenizer(), "train", 0)
  assert "4711" not in json.dumps(prompts[0].data)
  with pytest.raises(BadPrompt, match="has no field"):
    prompts[1]
  moved = dataclasses.replace(prompts[0], data=prompts[0].data | {"instance_id": "another"})
  with pytest.raises(BadPrompt, match="and was 'another'"):
    task.record(moved)
  with pytest.raises(ConfigError, match="no folder"):
    make_task(tmp_path, packages=("/opt/nowhere",)).prompts(None, "train", 0)
  for settings in ({"tools": ("python",)}, {"tests": "unittest"}, {"packages": ("/tmp/x",)}, {"call_timeout": 0.0}):
    with pytest.raises(ConfigError, match=f"environment.{next(iter(settings))}"):
      dataclasses.replace(task, **settings)


def test_a_docker_image_has_the_repository_and_its_history_is_hidden(tmp_path, monkeypatch):
  (tmp_path / "docker").mkdir()
  toy = DockerToy(tmp_path / "docker", monkeypatch)
  testbed = tmp_path / "testbed"
  (testbed / ".git").mkdir(parents=True)
  (testbed / "m.py").write_text(FILES["m.py"])
  record = {name: value for name, value in RECORD.items() if name not in ("snapshot", "base_commit")}
  task = dataclasses.replace(
    make_task(tmp_path, record), image="swebench", image_folder=str(testbed), tests="none", tools=("bash",)
  )
  seen, result, kept = play(task, f"<|tool_call|>{FIX}", "Done.")
  assert result.reward == 0.0 and "resolved" not in result.info and "+  return a + b" in kept[0][0]["model_patch"]
  (started,) = toy.calls("run")
  assert "swebench/sweb.eval.x86_64.toy_1776_m-1:latest" in started
  assert started[started.index(f"{testbed}/.git:ro,size=4096") - 1] == "--tmpfs"


def test_the_last_answer_must_fit_into_the_call_of_the_environment():
  """By its time-outs: the commands, the patch, the tests twice, a quarter for copies, 5 s for the judge."""
  task = RepositoryTask("tasks.jsonl", call_timeout=20.0, test_timeout=40.0)
  judged, unjudged = 20 + 40 + 2.25 * 40 + 5, 20 + 40
  for environment, path, seconds in (
    (task, "environment", judged),
    (SimulatedLatency(Mixture((Part(task),))), "environment.inner.parts.0.environment", judged),
    (dataclasses.replace(task, tests="none"), "environment", unjudged),
  ):
    whole, longer = (
      RunConfig(environment, rollout=RolloutConfig(environment_timeout=seconds + more)) for more in (0.0, 1.0)
    )
    (error,) = tool_relations(whole)
    assert str(error).startswith(f"{path}.call_timeout and test_timeout: ") and f" {seconds:g} s" in str(error)
    assert not list(tool_relations(longer))
  played_by_others = RunConfig(name="x", environment=Agent("toys.agent_toy:count", task))
  assert not list(tool_relations(played_by_others)) and not list(tool_relations(small_repositories_config()))


def test_the_example_of_the_readme_is_a_configuration(tmp_path):
  text = (REPOSITORY / "sao_jax/environments/README.md").read_text(encoding="utf-8")
  (source,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "RepositoryTask(" in block]
  namespace: dict = {}
  exec(compile(source, "README", "exec"), namespace)
  run = namespace["get_config"]()
  assert not list(tool_relations(run))
  assert run.environment.packages == ("/opt/pytest",) and run.rollout.max_turns == 300
