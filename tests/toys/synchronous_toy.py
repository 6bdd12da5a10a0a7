"""Synchronous environments: importable by worker processes, and quickly."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time

import numpy as np

from sao_jax.environments.base import StepResult
from sao_jax.environments.synchronous import SynchronousEnvironment
from sao_jax.episode import BadPrompt, GraderFailure, InfrastructureFailure, Prompt, PromptKey

STOP = 2


class Tokens:
  """A tokenizer in name only."""

  vocab_size = 100


@dataclasses.dataclass(frozen=True)
class Misbehaving:
  """Settings: what an episode does in its first step stands in its prompt."""

  name: str = "fake"

  def tokenizer(self):
    return Tokens()

  def make(self, tokenizer):
    return MisbehavingEpisode()

  def prompts(self, tokenizer, split, seed):
    return [prompt("")]


class MisbehavingEpisode(SynchronousEnvironment):
  """The reward is the number of its process."""

  stop_ids = (STOP,)

  def reset(self, prompt):
    self.kind = prompt.data["kind"]
    if self.kind == "no picture":
      raise BadPrompt("prompts", "no picture", "drop it", reason="no_picture")
    if self.kind == "garbage":
      return "no ids"
    return np.int32([3, 4])

  def step(self, action_ids):
    if self.kind == "raise":
      raise ValueError("a bug")
    if self.kind == "infrastructure":
      raise InfrastructureFailure("fake", "server gone")
    if self.kind == "grader":
      raise GraderFailure("fake", "crashed")
    if self.kind == "leave":
      sys.exit(3)
    if self.kind == "die":
      os._exit(4)
    if self.kind == "talk":
      return StepResult([5], done=False)
    if self.kind == "hang":
      time.sleep(3600)
    return StepResult([], True, float(os.getpid()), {"length": np.int64(len(action_ids))})

  def on_truncated(self, status):
    return np.array(0.5)  # of no dimension


@dataclasses.dataclass(frozen=True)
class Threaded:
  """Settings: every episode writes down the threads of its calls, and its steps wait for an event."""

  event: threading.Event
  episodes: list
  name: str = "fake"

  def make(self, tokenizer):
    self.episodes.append(ThreadedToy(self.event))
    return self.episodes[-1]


class ThreadedToy:
  """A plain class without a base, as users have them."""

  stop_ids = (STOP,)

  def __init__(self, event):
    self.event, self.calls = event, [("make", threading.get_ident())]

  def reset(self, prompt):
    self.calls.append(("reset", threading.get_ident()))
    return [3, 4]

  def step(self, action_ids):
    self.calls.append(("step", threading.get_ident()))
    self.event.wait(20)
    return StepResult([], True, 1.0)

  def close(self):
    self.calls.append(("close", threading.get_ident()))


def prompt(kind: str, number: int = 0) -> Prompt:
  return Prompt(PromptKey("fake", number, 0), {"kind": kind})


def nap(seconds: float) -> float:
  """A grader that takes its time."""
  time.sleep(seconds)
  return 1.0
