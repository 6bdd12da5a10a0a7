"""Reward functions for the tests of the grader pool: importable by its worker processes, and quickly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def burn(seconds: float, reward: float = 1.0) -> float:
  """Computes for so long, as Python code does."""
  end = time.process_time() + seconds
  while time.process_time() < end:
    sum(range(1000))
  return reward


def misbehave(kind: str):
  """Does what a grader should not do."""
  if kind == "raise":
    raise ValueError("cannot parse")
  if kind == "exit":
    sys.exit(0)
  if kind == "die":
    os._exit(0)
  if kind == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
  if kind == "hang":
    threading.Event().wait()
  if kind == "spin":
    return 9**9**9  # one operation, which never lets another thread run
  if kind == "ignore signals":
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, signal.SIG_IGN)
    threading.Event().wait()
  if kind == "print":
    sys.stdout.write("[1.0, null]\n" * 100_000)
    sys.stdout.flush()
    return 0.25
  if kind == "read":
    return float(len(sys.stdin.read()))
  if kind == "child":
    subprocess.Popen(["sleep", "3600"])
    threading.Event().wait()
  return {"nan": float("nan"), "none": None, "text": "1", "huge": 10**400, "list": [1.0], "bool": True}[kind]


def process_id() -> float:
  """Which worker this is."""
  return float(os.getpid())


def seen_by_a_worker(name: str) -> float:
  """1 when a module was imported."""
  return float(name in sys.modules)


def nested(depth: int) -> float:
  """Recurses without end."""
  return nested(depth + 1)
