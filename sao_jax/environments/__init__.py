"""Tasks: the protocol of environments, two complete ones, chats, and wrappers: faults, delays, synchronous code.

A prompt and the token ids sampled in each turn enter; token ids to append and one finite reward per episode leave. What
is not the policy's fault leaves as an `EnvironmentFailure`, never as a reward of 0. This room never imports jax itself.
"""

from __future__ import annotations

from sao_jax.environments.base import Environment, StepResult
from sao_jax.environments.calculator import Calculator
from sao_jax.environments.chat_environment import ChatEnvironment
from sao_jax.environments.environment_process import InProcesses
from sao_jax.environments.reasoning_gym import ReasoningGym
from sao_jax.environments.synchronous import InThreads
from sao_jax.environments.wrappers import Chaos

__all__ = [
  "Calculator",
  "Chaos",
  "ChatEnvironment",
  "Environment",
  "InProcesses",
  "InThreads",
  "ReasoningGym",
  "StepResult",
]
