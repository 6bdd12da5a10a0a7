"""A sampler, environments and prompts without a model, for the tests of the rollout room."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from sao_jax.config import RolloutConfig
from sao_jax.environments.base import Environment, StepResult
from sao_jax.episode import Prompt, PromptKey, Status, Trajectory
from sao_jax.rollout.buffer import TrajectoryBuffer
from sao_jax.rollout.builder import TrajectoryBuilder
from sao_jax.rollout.entries import Rollout
from sao_jax.rollout.ledger import Ledger
from sao_jax.rollout.outcomes import check_identity
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.sampler.requests import Completion, GenerateRequest

VOCAB_SIZE = 100
STOP = 2
CONTEXT_LENGTH = 64


def make_trajectory(
  rollout_id: int = 0,
  *,
  prompt: int = 2,
  turns: tuple[tuple[int, int], ...] = ((3, 2), (1, 0)),
  version: int | list[int] = 0,
  reward: float = 1.0,
  status: Status = Status.TERMINATED,
  info: dict[str, float] | None = None,
  sample: int = 0,
) -> Trajectory:
  """A trajectory of `turns` (sampled, observed) tokens; `version` for all sampled tokens, or one per token."""
  rng = np.random.default_rng(rollout_id)
  builder = TrajectoryBuilder(PromptKey("fake", rollout_id - sample, 0), rollout_id, sample)
  builder.append_prompt(rng.integers(3, VOCAB_SIZE, prompt, dtype=np.int32))
  for sampled, observed in turns:
    start = builder.num_sampled
    versions = [version] * sampled if isinstance(version, int) else version[start : start + sampled]
    ids = rng.integers(3, VOCAB_SIZE, sampled, dtype=np.int32)
    builder.append_action(ids, -rng.random(sampled, dtype=np.float32), np.asarray(versions, dtype=np.int32))
    builder.append_observation(rng.integers(3, VOCAB_SIZE, observed, dtype=np.int32))
  return builder.build(reward, status, info)


def make_buffer(batch_size: int = 4, eta: int = 2, group_size: int = 1, **kwargs) -> TrajectoryBuffer:
  """A buffer with its ledger."""
  return TrajectoryBuffer(Ledger(batch_size, eta, group_size=group_size), **{"max_staleness": -1, **kwargs})


def submit(ledger: Ledger, *rollout_ids: int) -> bool:
  """Submits rollouts of one prompt and starts them; False without capacity."""
  rollouts = [Rollout(number, prompt(rollout_ids[0]), sample) for sample, number in enumerate(rollout_ids)]
  if not ledger.submit(*rollouts):
    return False
  assert [ledger.start(FakePrompts(0)) for _ in rollouts] == rollouts
  return True


def fill(buffer: TrajectoryBuffer, *trajectories: Trajectory) -> list[bool]:
  """Submits and puts trajectories, each a group of its own."""
  results = []
  for trajectory in trajectories:
    assert submit(buffer.ledger, trajectory.rollout_id)
    results.append(buffer.put(trajectory))
  return results


class FakeSampler:
  """Answers after `delay(rollout_id)` seconds with `reply(request)` or with up to six tokens and a stop token.

  Tokens depend on the rollout id and the turn's place alone; versions are stamped when the answer is made.
  """

  progress = 0  # of a sampler that only ever waits

  def __init__(self, *, delay: Callable[[int], float] = lambda rollout_id: 0.0, reply=None, version: int = 0):
    self.version, self.error = version, None
    self.requests: list[GenerateRequest] = []
    self.open: set[int] = set()
    self._delay, self._reply = delay, reply
    self._sessions = 0

  def new_session(self) -> int:
    self._sessions += 1
    self.open.add(self._sessions)
    return self._sessions

  def release(self, session_id: int) -> None:
    self.open.remove(session_id)

  async def generate(self, request: GenerateRequest) -> Completion:
    assert request.session_id in self.open
    self.requests.append(request)
    await asyncio.sleep(self._delay(request.rollout_id))
    return self._reply(request) if self._reply is not None else self.answer(request)

  def answer(self, request: GenerateRequest) -> Completion:
    rng = np.random.default_rng([request.rollout_id, len(request.new_token_ids)])
    ids = [*rng.integers(3, VOCAB_SIZE, rng.integers(0, 6)).tolist(), STOP]
    return completion(ids[: request.max_tokens], version=self.version, stop_ids=request.stop_ids)


def completion(
  ids, *, version: int = 0, stop_ids=(STOP,), logprobs=None, finish_reason: str | None = None
) -> Completion:
  """A well-formed completion unless told otherwise."""
  return Completion(
    token_ids=ids,
    logprobs=[-0.5] * len(ids) if logprobs is None else logprobs,
    policy_versions=[version] * len(ids),
    finish_reason=finish_reason or ("stop" if ids[-1] in stop_ids else "length"),
  )


class FakeEnvironment(Environment):
  """A prompt of four tokens, `turns` turns, `observed` tokens between them; the reward is the prompt's id modulo 2.

  `faults` maps "reset", "step", "on_truncated" or "close" to a function that is called (and awaited) in its place.
  """

  name = "fake"
  stop_ids = (STOP,)

  def __init__(self, turns: int = 2, observed: int = 3, prompt: int = 4, faults: dict[str, Callable] | None = None):
    self.turns, self.observed, self.prompt_length, self.faults = turns, observed, prompt, faults or {}
    self.actions: list[np.ndarray] = []
    self.closed = False

  async def reset(self, prompt: Prompt) -> np.ndarray:
    self.prompt = prompt
    if "reset" in self.faults:
      return await self.faults["reset"]()
    return np.full(self.prompt_length, 3 + prompt.key.id % 50, dtype=np.int32)

  async def step(self, action_ids: np.ndarray) -> StepResult:
    self.actions.append(action_ids)
    if "step" in self.faults:
      return await self.faults["step"]()
    if len(self.actions) == self.turns:
      return StepResult([], True, float(self.prompt.key.id % 2))
    return StepResult(np.full(self.observed, 5, dtype=np.int32), False)

  async def on_truncated(self, status: Status) -> float:
    self.status = status
    if "on_truncated" in self.faults:
      return await self.faults["on_truncated"]()
    return 0.25

  async def close(self) -> None:
    self.closed = True
    if "close" in self.faults:
      await self.faults["close"]()


class FakePrompts:
  """Prompt 0, 1, 2, ... up to `count`."""

  def __init__(self, count: int = 10**9, name: str = "fake"):
    self.count, self.name, self.position = count, name, 0

  def __next__(self) -> Prompt:
    if self.position >= self.count:
      raise StopIteration
    self.position += 1
    return prompt(self.position - 1, self.name)

  def get_state(self) -> dict[str, int]:
    return {"position": self.position}

  def set_state(self, state: dict[str, int]) -> None:
    self.position = state["position"]


def prompt(number: int = 0, name: str = "fake") -> Prompt:
  return Prompt(PromptKey(name, number, 0), {"question": f"number {number}"})


CONFIG = RolloutConfig(
  batch_size=4,
  admission_staleness=2,
  max_staleness=-1,
  max_turns=3,
  max_tokens=40,
  max_tokens_per_turn=10,
  environment_timeout=5.0,
  environment_retries=0,
)


def make_loop(
  make_environment: Callable[[], Environment] = FakeEnvironment,
  sampler: FakeSampler | None = None,
  prompts: FakePrompts | None = None,
  *,
  slots: int = 8,
  watchdog_seconds: float = 600.0,
  context_length: int = CONTEXT_LENGTH,
  on_trained: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
  **config,
) -> RolloutLoop:
  """A loop that is not started; `config` overrides fields of `CONFIG`."""
  config = dataclasses.replace(CONFIG, **config)
  buffer = TrajectoryBuffer(
    Ledger.of(config),
    max_staleness=config.max_staleness,
    staleness=config.staleness,
    filter_equal_groups=config.filter_equal_groups,
  )
  return RolloutLoop(
    make_environment,
    prompts or FakePrompts(),
    sampler or FakeSampler(),
    buffer,
    config,
    context_length=context_length,
    vocab_size=VOCAB_SIZE,
    max_in_flight=slots,
    watchdog_seconds=watchdog_seconds,
    on_trained=on_trained,
  )


def train(
  loop: RolloutLoop,
  sampler: FakeSampler,
  steps: int,
  *,
  batch_size: int = 4,
  version: int = 0,
  train_time: float = 0.0,
  inspect: Callable[[list[Trajectory], int], None] = lambda batch, version: None,
) -> int:
  """A trainer that sleeps: takes batches, publishes, tells the loop; checks the identity of the counters every step."""
  for _ in range(steps):
    batch = loop.buffer.take(batch_size, version, timeout=30.0)
    inspect(batch, version)
    time.sleep(train_time)
    version += 1
    sampler.version = version
    loop.on_version(version)
    check_identity({**loop.stats()})
    loop.check()
  return version


class Running:
  """`with Running(loop):` starts it, and stops it whatever happens."""

  def __init__(self, loop: RolloutLoop):
    self.loop = loop

  def __enter__(self) -> RolloutLoop:
    self.loop.start()
    return self.loop

  def __exit__(self, *exc) -> None:
    self.loop.stop()
    assert not any(thread.name.startswith("rollout") for thread in threading.enumerate())
