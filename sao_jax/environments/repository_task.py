"""Repositories as tasks, in the style of SWE-bench: a problem is stated, the agent edits files, hidden tests decide.

    system prompt, problem statement                  a chat with tools
    bash, str_replace_editor                          turns with calls, in a sandbox with the base commit
    submit, or a turn without calls                   ends the work; its patch is judged in a fresh sandbox

The reward is 1 if all tests of FAIL_TO_PASS and PASS_TO_PASS pass, else 0. An episode that is cut is judged, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.chat.call_formats import check_format
from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.template import Message
from sao_jax.data.prompts import check_split, split_of
from sao_jax.data.records import RecordPrompts
from sao_jax.data.tokenizer import Tokenizer
from sao_jax.environments.chat_environment import Reply
from sao_jax.environments.hidden_tests import RUNNERS, Bench, Judgement, Runner
from sao_jax.environments.repository_record import SWEBENCH, RepositoryRecord, read_record
from sao_jax.environments.repository_tools import TOOLS, edit, run_bash
from sao_jax.environments.repository_work import SETUP_TIMEOUT, commit_base, place_files, read_patch
from sao_jax.environments.snapshots import read_snapshot
from sao_jax.environments.tool_environment import MAX_OUTPUT_TOKENS, ToolEnvironment, ToolError
from sao_jax.episode import BadPrompt, Prompt, PromptKey, Status
from sao_jax.errors import ConfigError
from sao_jax.rewards.queueing import waiting
from sao_jax.sandbox.bubblewrap import LocalSandbox
from sao_jax.sandbox.bubblewrap_command import View
from sao_jax.sandbox.contract import DEFAULT_LIMITS, Sandbox, SandboxLimits
from sao_jax.sandbox.docker import DockerSandbox
from sao_jax.sandbox.supervisor import WRITABLE
from sao_jax.settings import Reopened

SYSTEM_PROMPT = """You are a software engineer. Solve the problem below by editing the repository in /workspace.
Look around, reproduce the problem, correct its cause, and check that it is gone. Tests that you do not see will judge \
the result: edit the source, not the tests. When you are done, call submit."""
AGENT = {
  f"GIT_{who}_{what}": text for who in ("AUTHOR", "COMMITTER") for what, text in (("NAME", "agent"), ("EMAIL", ""))
}


@dataclasses.dataclass(frozen=True)
class RepositoryTask(Reopened):
  """Settings: the records, the sandbox, the tools, and the way in which hidden tests are run."""

  data: str = ""  # JSON lines, parquet or a folder of them (sao_jax/data/records.py), with SWE-bench's field names
  name: str = "repository"  # in prompt keys and metrics
  snapshot: str = "snapshot"  # field with a repository, bundle, archive or folder, or a mapping of files to texts
  image: str = ""  # field with the name of a docker image, for docker's sandbox in the place of the local one
  image_folder: str = "/testbed"  # the repository in an image
  split: str = ""  # of data that has several
  heldout_data: str = ""  # a data set of its own for evaluation; "": of `data`
  heldout_split: str = ""  # its split; without either, a tenth of the records is held out, by the hash of their names
  tokenizer_folder: str = ""  # a Hugging Face folder, or MODEL_CHECKPOINT; "": the byte tokenizer
  template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # such as enable_thinking
  call_format: str = ""  # "hermes", "glm" or "byte"; "": the tokenizer's own
  system_prompt: str = SYSTEM_PROMPT  # "": none
  tools: tuple[str, ...] = ("bash", "str_replace_editor", "submit")
  max_output_tokens: int = MAX_OUTPUT_TOKENS  # of one call's output, cut in the middle
  call_timeout: float = 60.0  # seconds for the commands of the shell in one turn, together
  tests: Runner = "pytest"  # "functions": plain functions, without a package; "none": unjudged, the reward is 0
  test_timeout: float = 600.0  # seconds for all tests together, which run twice; and for git to make the patch
  python: str = "python3"  # the interpreter inside
  packages: tuple[str, ...] = ()  # folders of this machine, shown inside, to import from: pytest, and what tests need
  sources: tuple[str, ...] = ("", "src")  # folders of the repository to import from
  sandboxes: int = 32  # at a time, those of agents and of tests together
  limits: SandboxLimits = DEFAULT_LIMITS

  def __post_init__(self):
    check_format(self.call_format, "environment.call_format")
    checks = (
      ("tools", bool(self.tools) and set(self.tools) <= set(TOOLS), f"some of {', '.join(TOOLS)}"),
      ("tests", self.tests in RUNNERS, f"one of {', '.join(RUNNERS)}"),
      ("call_timeout", 0.0 < self.call_timeout < float("inf"), "a number of seconds above 0"),
      ("test_timeout", 0.0 < self.test_timeout < float("inf"), "a number of seconds above 0"),
      ("sandboxes", self.sandboxes >= 1, "at least 1"),
    )
    for field, valid, remedy in checks:
      if not valid:
        raise ConfigError(f"environment.{field}", f"{getattr(self, field)!r} cannot work.", f"Use {remedy}.")

    # A sandbox has folders of its own there, which would lie over them.
    for folder in self.packages if not self.image else ():
      if any(os.path.realpath(folder).startswith(f"{own}/") for own in WRITABLE):
        problem = f"{folder!r} lies where a sandbox has folders of its own ({', '.join(WRITABLE)})."
        raise ConfigError("environment.packages", problem, "Move it, to /opt for example.")

  @functools.cached_property
  def renderer(self) -> ChatRenderer:
    return ChatRenderer.of(self.tokenizer_folder, self.template_options)

  @functools.cached_property
  def _places(self) -> weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]:
    return weakref.WeakKeyDictionary()

  @functools.cached_property
  def bench(self) -> Bench:
    """The way in which hidden tests are run."""
    return Bench(
      *(self.name, self.tests, self.python, self.packages, self.sources, self.image_folder, self.test_timeout)
    )

  @functools.cached_property
  def source(self) -> RecordPrompts:
    """The records of `data`."""
    return self._open(self.data, self.split)

  @functools.cached_property
  def _splits(self) -> dict[str, Sequence[Prompt]]:
    if self.heldout_data or self.heldout_split:
      heldout = self._open(self.heldout_data or self.data, self.heldout_split)
      return {"train": RepositoryPrompts(self.source, "train"), "heldout": RepositoryPrompts(heldout, "heldout")}
    chosen: dict[str, list[int]] = {"train": [], "heldout": []}
    for index in range(len(self.source)):
      chosen[_split_of(self.source, index)].append(index)
    return {split: RepositoryPrompts(self.source, "train", indices) for split, indices in chosen.items()}

  def tokenizer(self) -> Tokenizer:
    return self.renderer.tokenizer

  def make(self, tokenizer: Tokenizer) -> RepositoryEpisode:
    return RepositoryEpisode(self, self.renderer)

  def prompts(self, tokenizer: Tokenizer, split: str, seed: int) -> Sequence[Prompt]:
    self.check_sandbox()
    return self._splits[check_split(split)]

  def check_sandbox(self) -> None:
    """Refuses a machine that cannot make the sandboxes, by ConfigError."""
    if self.image:
      DockerSandbox.check()
    else:
      LocalSandbox.check(self._view)

  @functools.cached_property
  def _view(self) -> View:
    return View(read_only=self.packages)

  @property
  def longest_answer(self) -> float:
    """The seconds that the last turn may take: its commands, the patch, and the tests, which run twice."""
    judge = 0.0 if self.tests == "none" else self.bench.longest
    return self.call_timeout + min(SETUP_TIMEOUT, self.test_timeout) + judge

  @property
  def longest_answer_fields(self) -> str:
    """The fields that it follows from."""
    return "call_timeout and test_timeout"

  def record(self, prompt: Prompt) -> RepositoryRecord:
    """Reads the record of a prompt, hidden tests included.

    Raises:
      BadPrompt: it cannot be used, or the data has changed since the prompt was made.
    """
    place, index, name = prompt.data["set"], prompt.data["record"], prompt.data["instance_id"]
    source = self.source if place == "train" else self._splits["heldout"].source
    data = source[index].data if index < len(source) else {}
    if data.get("instance_id") != name:
      problem = f"Record {index} is {data.get('instance_id')!r}, and was {name!r}"
      raise BadPrompt("environment.data", problem, "Use the data of the run's beginning", reason="repository_damaged")
    return read_record(data, snapshot=self.snapshot, image=self.image, graded=self.tests != "none")

  def read_files(self, record: RepositoryRecord) -> bytes | None:
    """Reads the snapshot of a record as an archive; None if an image has it. It may take a while.

    Raises:
      BadPrompt: there is none.
    """
    folder = self.data if os.path.isdir(self.data) else os.path.dirname(self.data)
    return None if record.image else read_snapshot(record.snapshot, record.base_commit, os.path.expanduser(folder))

  async def start(self, record: RepositoryRecord) -> Sandbox:
    """Waits for a place, and starts a sandbox; `stop` ends it.

    Raises:
      InfrastructureFailure: it did not start.
    """
    with waiting():
      await self._place.acquire()
    try:
      if record.image:
        return await DockerSandbox.start(record.image, self.limits, hidden=(f"{self.image_folder}/.git",))
      return await LocalSandbox.start(self.limits, self._view)
    except BaseException:
      self._place.release()
      raise

  async def stop(self, sandbox: Sandbox) -> None:
    """Closes a sandbox, even if this call is cancelled, and makes its place free."""

    async def close(place: asyncio.Semaphore) -> None:
      try:
        await sandbox.close()
      finally:
        place.release()

    await asyncio.shield(asyncio.ensure_future(close(self._place)))

  @property
  def _place(self) -> asyncio.Semaphore:
    """The places for sandboxes, of this event loop."""
    return self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.sandboxes))

  async def judge(self, record: RepositoryRecord, archive: bytes | None, patch: str) -> Judgement:
    """Runs the hidden tests of a record on a patch, in a sandbox of their own."""
    sandbox = await self.start(record)
    try:
      return await self.bench.judge(sandbox, record, archive, patch)
    finally:
      await self.stop(sandbox)

  async def check_record(self, record: RepositoryRecord) -> str:
    """Looks if a record can be learned from: its tests fail at first, and pass with the patch that is known.

    Returns:
      The fault, "" if there is none. It takes as long as four runs of the tests; for offline use.
    """
    # As an agent finds it.
    archive = await asyncio.to_thread(self.read_files, record)
    before = await self.judge(record, archive, "")
    passing = [test for test in record.fail_to_pass if test not in before.failed]
    broken = [test for test in record.pass_to_pass if test in before.failed]

    # As its author left it.
    after = await self.judge(record, archive, record.patch)
    faults = (
      (passing, "pass before the problem is solved"),
      (broken, "fail before it"),
      ([] if after.applied else ["patch"], "cannot be applied"),
      (after.failed if after.applied else (), "fail with the patch"),
      (after.forged, "with the patch: the repository interferes with its tests"),
    )
    return "; ".join(f"{', '.join(names[:5])} {what}" for names, what in faults if names)

  def _open(self, data: str, split: str) -> RecordPrompts:
    fields = ["instance_id", "problem_statement", *([] if self.image in ("", SWEBENCH) else [self.image])]
    fields += [] if self.image else [self.snapshot, "base_commit"]
    fields += [] if self.tests == "none" else ["test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"]
    return RecordPrompts(data, environment=self.name, fields={field: field for field in fields}, split=split)


class RepositoryPrompts(Sequence[Prompt]):
  """Prompts with the problem and the number of its record: hidden tests stay out of checkpoints and logs."""

  def __init__(self, source: Sequence[Prompt], place: str, chosen: Sequence[int] | None = None):
    self.source, self._place = source, place
    self._chosen = range(len(source)) if chosen is None else chosen

  def __len__(self) -> int:
    return len(self._chosen)

  def __getitem__(self, index: int) -> Prompt:
    """Returns one prompt.

    Raises:
      BadPrompt: the record is damaged.
    """
    if not 0 <= index < len(self):
      raise IndexError(index)
    number = int(self._chosen[index])
    read = self.source[number]
    shown = {name: read.data[name] for name in ("instance_id", "problem_statement")}
    return Prompt(PromptKey(read.key.environment, int(index), 0), {"set": self._place, "record": number, **shown})


def _split_of(source: Sequence[Prompt], index: int) -> str:
  """Returns the split of a record by the hash of its name. One that is damaged is trained on, where it is skipped."""
  try:
    return split_of(str(source[index].data["instance_id"]))
  except BadPrompt:
    return "train"


class RepositoryEpisode(ToolEnvironment):
  """One problem. Its `texts` are the patch, `model_patch`, and the record's `instance_id`."""

  def __init__(self, settings: RepositoryTask, renderer: ChatRenderer):
    super().__init__(
      settings.name, renderer, call_format=settings.call_format, max_output_tokens=settings.max_output_tokens
    )
    self.tools = [TOOLS[name] for name in settings.tools]
    self.texts: dict[str, str] = {}
    self._settings, self._submitted = settings, False
    self._time_left = 0.0  # for the commands of this turn
    self._sandbox: Sandbox | None = None

  async def open(self, prompt: Prompt) -> Sequence[Message]:
    settings = self._settings
    self._record = await asyncio.to_thread(settings.record, prompt)
    self._archive = await asyncio.to_thread(settings.read_files, self._record)
    self._sandbox = await settings.start(self._record)
    await place_files(self._sandbox, settings.name, self._archive, settings.image_folder)
    self._base = await commit_base(self._sandbox, settings.name)
    system = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
    return [*system, {"role": "user", "content": self._record.problem_statement}]

  async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
    if name == "submit":
      self._submitted = True
      return "submitted"
    if name == "str_replace_editor":
      return await edit(self._sandbox, arguments)
    settings = self._settings
    if self._time_left <= 0.0:  # many slow calls in one turn are no way to have the episode discarded
      raise ToolError(f"Error: not run, since the commands of this turn have taken {settings.call_timeout:g} s")
    environment = AGENT | {"HOME": "/tmp", "PYTHONPATH": ":".join(settings.packages), "PAGER": "cat"}
    began = time.monotonic()
    try:
      return await run_bash(self._sandbox, arguments["command"], self._time_left, environment)
    finally:
      self._time_left -= time.monotonic() - began

  async def respond(self, said: str) -> Reply:
    self._time_left = self._settings.call_timeout
    reply = await super().respond(said)
    return await self._end(reply.info) if self._submitted and not reply.done else reply

  async def finish(self, said: str) -> Reply:
    return await self._end({})

  async def on_truncated(self, status: Status) -> float:
    return (await self._end({})).reward

  async def close(self) -> None:
    if self._sandbox is not None:
      sandbox, self._sandbox = self._sandbox, None
      await self._settings.stop(sandbox)

  async def _end(self, info: Mapping[str, float]) -> Reply:
    """Takes the patch, ends the agent's sandbox, and judges the patch in another one."""
    settings, record = self._settings, self._record
    patch = await read_patch(self._sandbox, self._base, min(SETUP_TIMEOUT, settings.test_timeout))
    await self.close()
    self.texts = {"instance_id": record.instance_id, "model_patch": patch or ""}
    facts = {"patch_lines": float(changed_lines(patch or "")), "patch_readable": float(patch is not None)}
    if settings.tests == "none":
      return Reply(done=True, reward=0.0, info={**info, **facts})

    # Nothing was changed, or nothing that can be told: that has been judged when the record was made.
    if not patch:
      unjudged = dict.fromkeys(("resolved", "fail_to_pass", "pass_to_pass", "patch_applied", "tests_forged"), 0.0)
      return Reply(done=True, reward=0.0, info={**info, **facts, **unjudged, "pass_to_pass": 1.0})
    result = await settings.judge(record, self._archive, patch)

    # Everything that a curve may show.
    facts |= {
      "resolved": float(result.resolved),
      "fail_to_pass": result.fraction(record.fail_to_pass),
      "pass_to_pass": result.fraction(record.pass_to_pass),
      "patch_applied": float(result.applied),
      "tests_forged": float(bool(result.forged)),
    }
    return Reply(done=True, reward=float(result.resolved), info={**info, **facts})


def changed_lines(patch: str) -> int:
  """Counts the lines that a diff adds or removes.

  >>> changed_lines("--- a/m.py\\n+++ b/m.py\\n@@ -1 +1 @@\\n-x\\n+y\\n")
  2
  """
  return sum(line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- ")) for line in patch.splitlines())
