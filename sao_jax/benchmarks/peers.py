"""Other frameworks on the same shapes: programs in a Python of their own, which run in turn with ours.

    python -m venv peers && peers/bin/pip install -r launch/peers/requirements.txt
    python -m launch.benchmark --suite=batching,train_step --peers=peers/bin/python

Such a program gets its task as one argument, JSON, and compiles. It then prints a line, and does the task once for
every line that it reads, each answered with a line. Nothing of it runs between two tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sao_jax.benchmarks.scale import Scale
from sao_jax.config import ModelConfig
from sao_jax.errors import ConfigError

# What would change how a peer runs: it takes all cores, as it does by default.
_NOT_THEIRS = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH", "JAX_COMPILATION_CACHE_DIR")


@dataclasses.dataclass(frozen=True)
class Peers:
  """Other frameworks.

  Attributes:
    python: the Python that has them.
    programs: the folder of their programs, with a requirements.txt.
  """

  python: str
  programs: pathlib.Path

  def requirements(self) -> dict[str, str]:
    """Reads the version of every framework that is compared with."""
    lines = (self.programs / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)

  def check(self) -> dict[str, str]:
    """Returns the versions of the frameworks.

    Raises:
      ConfigError: the Python does not run, or has another version of a framework.
    """
    listing = "print(json.dumps({each.name.lower(): each.version for each in metadata.distributions()}))"
    code = f"import json; from importlib import metadata; {listing}"
    wanted = f"pip install -r {self.programs / 'requirements.txt'}"
    remedy = f"Give the bin/python of a virtual environment, after {wanted} in it."
    command = [self.python, "-c", code]
    try:
      told = subprocess.run(command, capture_output=True, text=True, timeout=120, env=_environment())
      versions = json.loads(told.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
      raise ConfigError("--peers", f"{self.python} is no Python that runs: {error}.", remedy) from error

    found = {name: versions.get(name) for name in self.requirements()}
    for name, version in self.requirements().items():
      if (found[name] or "").partition("+")[0] != version:
        problem = f"{self.python} has {name} {found[name]}, and {version} is compared with."
        raise ConfigError("--peers", problem, remedy)
    return found

  @contextlib.contextmanager
  def start(self, program: str, task: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Starts a program; yields a function that does its task once, and returns when it is done.

    Raises:
      RuntimeError: the program has ended.
    """
    process = subprocess.Popen(
      [self.python, str(self.programs / f"{program}.py"), json.dumps(task)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=_environment(),
    )

    def answer() -> None:
      # Libraries print too; only the line that answers counts.
      for line in process.stdout:
        if line == "done\n":
          return
      raise RuntimeError(f"{program} ended with status {process.wait()}; what it said is above.")

    def run() -> None:
      process.stdin.write("run\n")
      process.stdin.flush()
      answer()

    try:
      answer()
      yield run
    finally:
      with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
      process.kill()
      process.wait()


def _environment() -> dict[str, str]:
  return {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS} | {"JAX_PLATFORMS": "cpu"}


def model_task(config: ModelConfig) -> dict[str, Any]:
  """Describes a model to a peer, by the names of Qwen3's config.json, whose blocks ours are."""
  names = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "d_ff_expert": "moe_intermediate_size",
  }
  values = dataclasses.asdict(config)
  return {theirs: values[ours] for ours, theirs in names.items()}


def sampling_task(scale: Scale, config: ModelConfig, waves: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any]:
  """Describes the uneven (prompt, answer) lengths, in the waves in which a batch sampler takes them."""
  return {
    "model": model_task(config),
    "waves": [list(map(list, wave)) for wave in waves],
    "longest_prompt": scale.prompt_lengths[1],
    "longest_answer": scale.answer_maximum,
  }


def training_task(scale: Scale, config: ModelConfig) -> dict[str, Any]:
  """Describes a train step: rows of a prompt and an answer, on which a critic and a policy are updated once each."""
  prompt = scale.tokens // 4
  return {
    "model": model_task(config),
    "rows": scale.rows,
    "prompt": prompt,
    "answer": scale.tokens - prompt,
    "micro_batches": scale.micro_batches,
  }
