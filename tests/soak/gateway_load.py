"""Many agents at once through the gateway, impolite ones too: every episode has an outcome. Prints what was measured.

    python -m soak.gateway_load [--sampler=tiny] [--dropped=0.05 --killed=1]   # with tests/ in PYTHONPATH

Agents run in processes of their own. `--killed` of these are ended by SIGKILL in the middle: their episodes must end as
failures of the type for silent agents, those of all others with their rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
from toys import agent_toy, processes, training_toy
from toys.paths import REPOSITORY, TESTS

from sao_jax.config import ModelConfig, RunConfig
from sao_jax.evaluation import fixed_policy
from sao_jax.gateway.agent import ADMIN_KEY, Agent
from sao_jax.gateway.agent_episode import AgentEpisode
from sao_jax.gateway.session_book import SessionBook
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.params import init_params
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import Completion, GenerateRequest
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService
from sao_jax.training.heap import frozen_heap

BEAT = 0.002  # seconds
# A process that does nothing: how late does it wake up on this machine?
IDLE = f"""
import select, sys, time
worst = 0.0
while not select.select([sys.stdin], [], [], 0)[0]:
  before = time.perf_counter()
  time.sleep({BEAT})
  worst = max(worst, time.perf_counter() - before - {BEAT})
print(1000 * worst)
"""
END = agent_toy.TOKENIZER.end_id


class Beats:
  """Gaps in the beats of an event loop, in seconds: how late each beat was, and how long the loop itself computed.

  A loop that computes little and is late waits for the machine, or for other threads.
  """

  def __init__(self):
    self._at, self._late, self._busy, self._begun = [], [], [], False

  def begin(self, loop: asyncio.AbstractEventLoop) -> None:
    """Begins to beat, in the loop's thread, unless it does already."""
    if not self._begun:
      self._begun = True
      self._next(loop, loop.time(), time.thread_time())

  def _next(self, loop: asyncio.AbstractEventLoop, due: float, computed: float) -> None:
    self._at.append(loop.time())
    self._late.append(loop.time() - due)
    self._busy.append(time.thread_time() - computed)
    loop.call_later(BEAT, self._next, loop, loop.time() + BEAT, time.thread_time())

  def facts(self) -> dict[str, float]:
    """Milliseconds."""
    late, busy = (1000 * np.array(times or [0.0]) for times in (self._late, self._busy))
    quantiles = {f"p{100 * q:g}": round(float(np.quantile(late, q)), 1) for q in (0.5, 0.99, 0.999)}
    where = round(float(self._at[int(late.argmax())] - self._at[0]), 1) if self._at else 0.0
    return {"largest": round(late.max(), 1), "after_s": where, "largest_computed": round(busy.max(), 1)} | quantiles


class WatchedEpisode(AgentEpisode):
  """An agent's episode that lets its event loop be watched."""

  async def reset(self, prompt):
    self._settings.beats.begin(asyncio.get_running_loop())
    return await super().reset(prompt)


@dataclasses.dataclass(frozen=True)
class WatchedAgent(Agent):
  """Agents that claim their episodes, and the beats of the loop of rollouts."""

  beats: Beats = dataclasses.field(default_factory=Beats, compare=False)

  def make(self, tokenizer):
    return WatchedEpisode(self, self._renderer)


class FakeService:
  """A sampler without a model: two words and a stop token, after a millisecond."""

  progress, error, version = 0, None, 0

  def __init__(self):
    self.open: set[int] = set()
    self._opened = 0

  def new_session(self) -> int:
    self._opened += 1
    self.open.add(self._opened)
    return self._opened

  def release(self, session_id: int) -> None:
    self.open.discard(session_id)

  async def generate(self, request: GenerateRequest) -> Completion:
    await asyncio.sleep(0.001)
    ids = agent_toy.TOKENIZER.encode_with_specials(f"I see {len(request.new_token_ids)}<|end|>")
    FakeService.progress += 1
    return Completion(ids, np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32), "stop")


def make_config(episodes: int, turns: int, think_timeout: float) -> RunConfig:
  """As many slots as episodes, in a context for all turns."""
  context = 64 + 80 * turns
  config = training_toy.replace(
    training_toy.get_config(),
    sampler={
      "num_slots": episodes,
      "context_length": context,
      "decode_batch": min(episodes, 64),
      "decode_steps": 8,
      "prefill_buckets": (64,),
      "prefill_batch": min(episodes, 8),
      "window_buckets": (context // 4, context) if turns > 8 else (context,),
    },
    rollout={
      "max_turns": turns + 1,
      "max_tokens": context,
      "max_tokens_per_turn": 32,
      "environment_timeout": 600.0,
      "row_lengths": (context,),
    },
  )
  model = ModelConfig(vocab_size=272, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16)
  agent = WatchedAgent(None, agent_toy.Tasks(episodes), think_timeout=think_timeout, grace_seconds=0.5)
  return dataclasses.replace(config, environment=agent, model=model)


def make_service(config: RunConfig, sampler: str):
  """The fake sampler, or the real one with a tiny model that ends its turns soon."""
  if sampler == "fake":
    return contextlib.nullcontext(FakeService())
  params = init_params(param_specs(config.model), jax.random.key(0))
  # All tokens share a direction, and the head reads the end of a turn from it.
  params["embed"] = params["embed"] + 1.0
  params["head"] = params["head"].at[:, END].add(0.25)
  engine = Engine(params, config.model, config.sampler, seed=0)
  engine.warm_up(prefixes=True)
  return SamplerService(Scheduler(engine))


@dataclasses.dataclass
class Crowd:
  """Processes of agents, and what they said in the end."""

  running: list[subprocess.Popen]
  done: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  killed: int = 0

  def kill_midway(self, book: SessionBook, options: argparse.Namespace) -> None:
    """Kills some processes once a third of all requests was answered."""
    answered = lambda: sum(session.requests for session in list(book._by_id.values()))
    while answered() < options.episodes * options.turns / 3:
      time.sleep(0.01)
    for process in self.running[: options.killed]:
      process.kill()
      self.killed += 1

  def join(self) -> None:
    for process in self.running:
      said, _ = process.communicate(timeout=120)
      if process.returncode == 0:
        self.done.update(json.loads(said))
    codes = [process.returncode for process in self.running]
    assert codes == [-9] * self.killed + [0] * (len(codes) - self.killed), f"agents failed: {codes}"


def start_agents(url: str, key: str, options: argparse.Namespace) -> Crowd:
  """Starts the processes; together they have one agent for each episode."""
  share = -(-options.episodes // options.processes)
  flags = [f"--{name}={getattr(options, name)}" for name in ("turns", "delay", "sigma", "dropped")]
  path = os.pathsep.join([str(REPOSITORY), str(TESTS), processes.NO_TORCH])
  command = [sys.executable, "-m", "soak.gateway_agents", url, f"--agents={share}", *flags]
  environment = processes.environment(PYTHONPATH=path, **{ADMIN_KEY: key})
  return Crowd(
    [
      subprocess.Popen([*command, f"--seed={i}"], env=environment, stdout=subprocess.PIPE, text=True)
      for i in range(options.processes)
    ]
  )


def resident() -> int:
  """Megabytes that this process holds."""
  pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


class Collections:
  """Pauses by Python's garbage collector, in milliseconds: by the clock, and as computed by the thread that paused."""

  def __init__(self):
    self.pauses, self.computed, self._begun = [0.0], [0.0], (0.0, 0.0)

  def __call__(self, phase: str, info: dict) -> None:
    now = time.perf_counter(), time.thread_time()
    if phase == "start":
      self._begun = now
    else:
      self.pauses.append(1000 * (now[0] - self._begun[0]))
      self.computed.append(1000 * (now[1] - self._begun[1]))


@contextlib.contextmanager
def watching(facts: dict) -> Iterator[None]:
  """Notes memory, and how late a thread of this machine wakes up that has nothing to do with any of this."""
  collections_ = Collections()
  gc.callbacks.append(collections_)
  before, largest, ended = resident(), [resident()], threading.Event()

  def look() -> None:
    while not ended.wait(0.05):
      largest.append(resident())

  idle = subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  thread = threading.Thread(target=look)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    gc.callbacks.remove(collections_)
    longest = {"by_clock": max(collections_.pauses), "computed": max(collections_.computed)}
    facts["longest_collection_ms"] = {name: round(value, 1) for name, value in longest.items()}
    said, _ = idle.communicate()  # which closes its input
    facts["idle_process_gap_ms"] = round(float(said), 1)
    facts["memory_mb"] = {"before": before, "largest": max(largest)}


def run(options: argparse.Namespace) -> dict:
  """Plays all episodes; returns what was measured. Raises AssertionError where an episode was lost."""
  os.environ[ADMIN_KEY] = secrets.token_urlsafe(16)
  config = make_config(options.episodes, options.turns, options.think_timeout)
  agent, facts = config.environment, {}
  prompts = agent.prompts(agent.tokenizer(), "train", 0)
  beats = Beats()
  with make_service(config, options.sampler) as service:
    server = agent.gateway._server
    crowd = start_agents(server.root, os.environ[ADMIN_KEY], options)
    killer = threading.Thread(target=crowd.kill_midway, args=(agent.gateway.book, options), daemon=True)
    if options.killed:
      killer.start()
    watch = watching(facts) if options.measure else contextlib.nullcontext()
    with frozen_heap(), watch:  # as training has it
      server.loop.call_soon_threadsafe(beats.begin, server.loop)
      began = time.monotonic()
      trajectories, failures = fixed_policy.run_episodes(config, service, list(prompts), temperature=1.0)
      seconds = time.monotonic() - began
    agent.gateway.close()
    crowd.join()
    left = service.stats()["waiting_sessions"] if options.sampler != "fake" else len(service.open)

  # Each episode has one outcome, and nothing is held any more.
  kinds = collections.Counter(type(failure).__name__ for failure in failures)
  assert len(trajectories) + len(failures) == options.episodes, "an episode was lost"
  assert set(kinds) <= {"AgentSilent"} and bool(kinds) <= bool(options.killed), kinds
  assert not left, f"{left} sessions are held"
  short = [t for t in trajectories if t.reward != 1.0]
  assert all(trajectory.info["requests"] <= options.turns for trajectory in trajectories), "one was sampled twice"
  assert not short or options.sampler != "fake", "an episode was cut"
  requests = sum(trajectory.info["requests"] for trajectory in trajectories)
  return facts | {
    "episodes": options.episodes,
    "with_reward": len(trajectories) - len(short),
    "cut": len(short),
    "failures": dict(kinds),
    "agents": dict(crowd.done),
    "seconds": round(seconds, 1),
    "requests_per_second": round(requests / seconds, 1),
    "gateway_gap_ms": beats.facts(),
    "rollouts_gap_ms": agent.beats.facts(),
  }


def parser() -> argparse.ArgumentParser:
  """The command line."""
  parser = argparse.ArgumentParser()
  for name, default in {"episodes": 256, "turns": 50, "processes": 16, "killed": 0}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  settings = {"delay": 0.2, "sigma": 1.0, "dropped": 0.0, "think_timeout": 120.0}
  for name, default in settings.items():
    parser.add_argument(f"--{name}", type=float, default=default)
  parser.add_argument("--sampler", choices=("fake", "tiny"), default="fake")
  parser.add_argument("--measure", type=int, default=1)
  return parser


if __name__ == "__main__":
  sys.stdout.write(json.dumps(run(parser().parse_args()), indent=2) + "\n")
