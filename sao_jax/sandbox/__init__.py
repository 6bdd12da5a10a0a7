"""Sandboxes: places where programs that a policy wrote run, and can harm nothing outside.

A command, its standard input and its limits enter; what it wrote and how it ended leave, as a `CommandResult`, whatever
it tried. An `InfrastructureFailure` leaves when the sandbox itself is at fault. This room never imports jax.
"""

from sao_jax.sandbox.bubblewrap import LocalSandbox
from sao_jax.sandbox.contract import CommandResult, FileRefused, Sandbox, SandboxLimits
from sao_jax.sandbox.docker import DockerSandbox
from sao_jax.sandbox.sandbox_pool import SandboxPool
from sao_jax.sandbox.verdict import graded_run

__all__ = [
  "CommandResult",
  "DockerSandbox",
  "FileRefused",
  "LocalSandbox",
  "Sandbox",
  "SandboxLimits",
  "SandboxPool",
  "graded_run",
]
