"""Ctrl-C and SIGTERM during an evaluation or the audit: promptly, cleanly, and with nothing written that is not so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
import threading
import time

import pytest
from toys import hanging_toy, processes, training_toy
from toys.paths import REPOSITORY, TESTS
from toys.rollout_fakes import FakeSampler, completion

from sao_jax.evaluation import event_loop
from sao_jax.evaluation.event_loop import run_in_background
from sao_jax.evaluation.fixed_policy import run_episodes
from sao_jax.interrupt import Interrupt, Interrupted
from sao_jax.rollout.outcomes import RolloutSilent

PROMPTLY = 5.0  # seconds


def requested_after(seconds: float) -> Interrupt:
  """An interruption that comes later."""
  interrupt = Interrupt()
  threading.Timer(seconds, lambda: setattr(interrupt, "requested", True)).start()
  return interrupt


async def hang_against_cancellation():
  while True:
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.sleep(3600)


async def wait(seconds: float = 3600.0, result: int = 7) -> int:
  await asyncio.sleep(seconds)
  return result


def test_the_result_and_the_exception_come_back_as_themselves():
  assert run_in_background(wait(0.0)) == 7
  error = ValueError("mine")

  async def fail():
    raise error

  with pytest.raises(ValueError) as caught:
    run_in_background(fail(), interrupt=Interrupt())
  assert caught.value is error

  async def inside():  # as in a notebook, whose thread runs an event loop
    return run_in_background(wait(0.0, 8))

  assert asyncio.run(inside()) == 8


@pytest.mark.parametrize("coroutine", [wait, hang_against_cancellation])
def test_an_interruption_ends_it_at_once_whatever_it_is_doing(coroutine, monkeypatch):
  monkeypatch.setattr(event_loop, "PATIENCE", 0.2)
  began = time.monotonic()
  with pytest.raises(Interrupted):
    run_in_background(coroutine(), interrupt=requested_after(0.1))
  assert time.monotonic() - began < PROMPTLY


def test_what_is_left_over_may_end_in_peace_but_holds_up_nobody(monkeypatch):
  monkeypatch.setattr(event_loop, "PATIENCE", 0.5)
  ended = []

  async def main():
    tasks.append(asyncio.create_task(close()))
    tasks.append(asyncio.create_task(hang_against_cancellation()))
    await asyncio.sleep(0)
    return 5

  async def close():
    await asyncio.sleep(0.2)
    ended.append(None)

  tasks: list[asyncio.Task] = []
  began = time.monotonic()
  assert run_in_background(main()) == 5
  assert ended == [None] and time.monotonic() - began < PROMPTLY


def test_a_look_that_raises_ends_it():
  def look(running):
    assert running.is_running()
    raise RuntimeError("enough")

  with pytest.raises(RuntimeError, match="enough"):
    run_in_background(wait(), look=look)


def toy(**training):
  config = dataclasses.replace(training_toy.get_config(), environment=hanging_toy.Hanging())
  return training_toy.replace(config, training=training, rollout={"environment_timeout": 3600.0})


def some_prompts(config, count: int = 6):
  return config.environment.prompts(config.environment.tokenizer(), "heldout", 0)[:count]


def test_a_second_ctrl_c_does_what_the_first_would_have_done_before(monkeypatch):
  with Interrupt() as interrupt:
    signal.raise_signal(signal.SIGINT)
    assert interrupt.requested
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)

  class Gone(BaseException):
    pass

  def leave(number, frame):
    raise Gone

  previous = signal.signal(signal.SIGINT, leave)
  try:
    with pytest.raises(Gone), Interrupt():
      signal.raise_signal(signal.SIGINT)
      signal.raise_signal(signal.SIGINT)
  finally:
    signal.signal(signal.SIGINT, previous)


def test_every_signal_of_a_scheduler_or_a_lost_terminal_is_a_request():
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
      assert not interrupt.requested
      signal.raise_signal(number)
      assert interrupt.requested
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_what_was_ignored_stays_ignored(number):
  before = signal.signal(number, signal.SIG_IGN)  # as nohup has it, and shells for what runs in the background
  try:
    with Interrupt() as interrupt:
      signal.raise_signal(number)
      assert not interrupt.requested and signal.getsignal(number) == signal.SIG_IGN
    assert signal.getsignal(number) == signal.SIG_IGN
  finally:
    signal.signal(number, before)


BLOCKED = """
import hashlib, os, signal, sys
from absl import logging
import launch
from sao_jax.interrupt import Interrupt
logging.set_verbosity(logging.INFO)
signal.signal(signal.SIGINT, launch.stop)
with Interrupt(saves=sys.argv[1] == "saves"):
  child = os.fork()
  if child == 0:
    signal.raise_signal(signal.SIGTERM)  # a copy dies of it, and says nothing to its parent
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
  print("blocked", file=sys.stderr, flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as a compilation: the main thread sees no signal
"""


@pytest.mark.parametrize(
  "saves, numbers, status, said",
  [
    ("nothing", [signal.SIGTERM], 143, "SIGTERM: nothing was begun that could be saved"),
    ("nothing", [signal.SIGHUP], 129, "SIGHUP: nothing was begun"),
    ("nothing", [signal.SIGINT], 130, "Interrupted."),
    ("saves", [signal.SIGINT, signal.SIGINT], 130, "A second Ctrl-C ends the program at once"),
  ],
)
def test_a_signal_is_noticed_while_the_main_thread_compiles(saves, numbers, status, said):
  process = subprocess.Popen(
    [sys.executable, "-c", BLOCKED, saves], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
  )  # fmt: skip
  try:
    lines = [process.stderr.readline()]
    assert lines == ["blocked\n"]
    for number in numbers:
      process.send_signal(number)
      lines.append(process.stderr.readline())
    assert process.wait(60) == status and said in "".join(lines)
  finally:
    process.kill()
    process.stderr.close()


def test_episodes_are_interrupted_with_all_their_sessions_released():
  before = set(threading.enumerate())
  config, sampler = toy(), FakeSampler(reply=lambda request: completion([5, 24], stop_ids=request.stop_ids))
  with pytest.raises(Interrupted):
    run_episodes(config, sampler, some_prompts(config), temperature=1.0, interrupt=requested_after(0.3))
  assert len(sampler.requests) == 6 and not sampler.open and set(threading.enumerate()) <= before


def test_silent_episodes_end_with_their_stacks():
  config = toy(watchdog_seconds=0.5)
  sampler = FakeSampler(reply=lambda request: completion([5, 24], stop_ids=request.stop_ids))
  with pytest.raises(RolloutSilent, match=r"(?s)in 6 episodes.*hanging_toy.py:\d+ step"):
    run_episodes(config, sampler, some_prompts(config), temperature=1.0)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("interrupt")
  process, _ = launch("sft", workdir)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  return workdir


def launch(program, workdir, *flags):
  mark = workdir / f"{program}_hangs"
  command = [
    sys.executable,
    "-m",
    f"launch.{program}",
    f"--workdir={workdir}",
    "--config=tests/toys/hanging_toy.py",
    *flags,
  ]
  environment = processes.environment(PYTHONPATH=f"{processes.NO_TORCH}:{TESTS}", SAO_TEST_MARK=mark)
  process = subprocess.Popen(
    command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )
  return process, mark


@pytest.mark.parametrize(
  "program, flags, number",
  [
    ("evaluate", ("--phase=sft",), signal.SIGINT),
    ("sample", ("--phase=sft",), signal.SIGTERM),
    ("train", (), signal.SIGTERM),  # during the audit
    ("train", ("--config.training.audit=False", "--config.evaluation.every=1"), signal.SIGINT),
  ],
)
def test_a_program_stops_in_the_middle_of_episodes_that_hang(workdir, program, flags, number):
  process, mark = launch(program, workdir, *flags)
  deadline = time.monotonic() + 240
  while not mark.exists():
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < deadline, "no episode in four minutes"
    time.sleep(0.05)
  process.send_signal(number)
  output, _ = process.communicate(timeout=60)
  mark.unlink()
  assert process.returncode == (75 if program == "train" else 130), output
  assert "Traceback" not in output and "Interrupted" in output
  assert not list(workdir.glob("evaluation*.json"))
  if program == "train":
    assert (workdir / "train" / "0").is_dir()  # where the same command goes on
    metrics = workdir / "metrics.jsonl"
    assert not metrics.exists() or "heldout" not in metrics.read_text()
