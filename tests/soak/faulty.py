"""The configuration of a soak: a toy run whose environment and data set have every kind of fault, at set rates.

    python -m launch.train --config=tests/soak/faulty.py --workdir=DIR

An episode has one fault at most, drawn from its prompt's key. While the file that `OUTAGE` names exists, every call
fails as if the server behind it were down.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import hashlib
import math
import os
import pathlib
import time
from collections.abc import Sequence

import numpy as np
from toys import training_toy

from sao_jax.config import RunConfig
from sao_jax.episode import InfrastructureFailure, Prompt, PromptKey

OUTAGE = "SAO_JAX_SOAK_OUTAGE"  # the environment variable with the file's path
TIMEOUT = 0.4  # seconds that an environment's call may take
MINUTE = 60.0
CONTEXT = 32
CHECKED = 64  # a data set that begins with such a prompt is refused at the start

# Shares of the prompts. `unstorable_prompt` and `long_prompt` are faults of the data, the rest of the environment.
RATES = {
  "exception_in_reset": 0.01,
  "exception_in_step": 0.02,
  "exception_in_grading": 0.01,
  "exception_in_close": 0.01,
  "panic_in_constructor": 0.01,
  "panic_in_reset": 0.01,
  "panic_in_step": 0.01,
  "panic_in_close": 0.01,
  "cancelled_in_step": 0.01,
  "hang_in_reset": 0.005,
  "hang_in_step": 0.005,
  "hang_in_close": 0.005,
  "blocks": 0.004,
  "slow": 0.01,
  "server_error": 0.02,
  "garbage_ids": 0.01,
  "garbage_result": 0.01,
  "reward_not_finite": 0.01,
  "unstorable_info": 0.01,
  "long_prompt": 0.02,
  "empty_prompt": 0.01,
  "unstorable_prompt": 0.02,
}


class Panic(BaseException):
  """What a panic in an extension module looks like: no `Exception`."""


def fault_of(key: PromptKey) -> str | None:
  """Draws the fault of a prompt's episodes; None for most."""
  digest = hashlib.sha256(repr(tuple(key)).encode()).digest()
  draw = int.from_bytes(digest[:8], "big") / 2**64
  for name, rate in RATES.items():
    if draw < rate:
      return name
    draw -= rate
  return None


class FaultyEpisode(training_toy.ParityEpisode):
  """Two turns of a game that any policy half wins, with a fault in one of its calls."""

  _made: collections.Counter = collections.Counter()

  def __init__(self):
    # The constructor does not know its prompt.
    self._made["episodes"] += 1
    self._fault = None
    if self._made["episodes"] % round(1 / RATES["panic_in_constructor"]) == 0:
      raise Panic("in the constructor")

  async def reset(self, prompt):
    self._fault = fault_of(prompt.key)
    await self._call("reset")
    if self._fault == "long_prompt":
      return np.ones(CONTEXT + 8, np.int32)
    if self._fault == "empty_prompt":
      return np.zeros(0, np.int32)
    return await super().reset(prompt)

  async def step(self, action_ids):
    await self._call("step")
    result = await super().step(action_ids)
    info = {"when": datetime.datetime.now()} if self._fault == "unstorable_info" else {"turns": float(self.turns)}
    result = dataclasses.replace(result, info=info)

    if self._fault == "garbage_ids" and not result.done:
      return dataclasses.replace(result, observation=[-1])
    if self._fault == "garbage_result":
      return "no result"
    if result.done and self._fault == "reward_not_finite":
      return dataclasses.replace(result, reward=math.nan)
    if result.done:
      await self._call("grading")
    return result

  async def on_truncated(self, status):
    await self._call("grading")
    return await super().on_truncated(status)

  async def close(self):
    await self._call("close")

  async def _call(self, place: str) -> None:
    """Waits as a real server makes one wait, with the fault of this place."""
    path = os.environ.get(OUTAGE)
    if path and place != "close" and pathlib.Path(path).exists():
      raise ConnectionRefusedError("the server is down")
    await asyncio.sleep(0.002)

    fault = self._fault
    if fault == f"exception_in_{place}":
      raise ValueError(f"in {place}")
    if fault == f"panic_in_{place}":
      raise Panic(f"in {place}")
    if fault == f"cancelled_in_{place}":
      raise asyncio.CancelledError
    if fault == f"hang_in_{place}":
      await asyncio.Event().wait()
    if place == "step" and fault == "blocks":
      time.sleep(1.5 * TIMEOUT)
    if place == "step" and fault == "slow":
      await asyncio.sleep(0.5 * TIMEOUT)
    if place == "step" and fault == "server_error":
      raise InfrastructureFailure(self.name, "503 of a server")


class FaultyPrompts(Sequence[Prompt]):
  """A large data set, some of whose items cannot be stored."""

  def __init__(self, name: str, offset: int, size: int):
    self._name, self._offset, self._size = name, offset, size

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, index: int) -> Prompt:
    if not 0 <= index < self._size:
      raise IndexError(index)
    key = PromptKey(self._name, int(index), 0)
    data = {"number": int(index) % 8 + self._offset}
    if index >= CHECKED and fault_of(key) == "unstorable_prompt":
      data["labels"] = {"a set", "is no JSON"}
    return Prompt(key, data)


@dataclasses.dataclass(frozen=True)
class Faulty(training_toy.Parity):
  """Settings of the environment."""

  name: str = "faulty"

  def make(self, tokenizer):
    return FaultyEpisode()

  def prompts(self, tokenizer, split, seed):
    return FaultyPrompts(self.name, offset=8 * (split == "heldout"), size=64 if split == "heldout" else 1_000_000)


def get_config() -> RunConfig:
  """The toy run, with short time-outs and without an end."""
  config = training_toy.replace(
    training_toy.get_config(),
    rollout={"environment_timeout": TIMEOUT, "environment_retries": 1},
    training={"steps": 10_000_000, "checkpoint_every": 20, "watchdog_seconds": 2 * MINUTE, "lock_seconds": 3.0},
    evaluation={"every": 50, "prompts": 16},
  )
  return dataclasses.replace(config, name="soak", environment=Faulty())
