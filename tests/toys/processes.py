"""Where the programs that tests start run: on one device, as at home, compiled as the tests are.

Compilation took most of the suite's time. A toy model's program runs for a millisecond however it is compiled, so XLA
is asked for its quickest code generation (a train step: 2.8 instead of 11.6 seconds of CPU time);
`launch/test.sh --optimized` compiles as production does.
"""

from __future__ import annotations

import os

from toys.paths import TESTS

QUICK_COMPILATION = {"xla_backend_optimization_level": "0", "xla_cpu_use_fusion_emitters": "false"}
# Put on the path of a program, it saves the two seconds in which tensorboardX imports torch, where that is installed.
NO_TORCH = str(TESTS / "toys" / "no_torch")
DEVICES = "xla_force_host_platform_device_count"


def xla_flags(given: str, **wanted: str) -> str:
  """XLA_FLAGS with those that are wanted and not given yet."""
  return " ".join([*given.split(), *(f"--{name}={value}" for name, value in wanted.items() if name not in given)])


def environment(**more: object) -> dict[str, str]:
  """The environment variables of a program with one device; `more` are set, too."""
  flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if DEVICES not in flag]
  return os.environ | {"XLA_FLAGS": " ".join(flags)} | {name: str(value) for name, value in more.items()}
