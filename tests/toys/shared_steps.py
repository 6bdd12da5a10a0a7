"""Train steps that runs of one process share: most runs of the tests have the same few programs.

Tracing and lowering a train step takes longer than a toy run itself, and every run makes its steps anew. Here a run
gets the program that an earlier one has compiled, if all that it is made of is the same: the settings of networks,
algorithm, sampler and rollouts, what is frozen, and the shapes and places of all arrays.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from sao_jax.config import RunConfig
from sao_jax.learner import compilation, setup
from sao_jax.learner.setup import Learner

KEPT = 32  # programs, those that were not used for longest give way
# No part of a train step.
OTHER_SECTIONS = frozenset({"name", "environment", "sft", "value_pretraining", "evaluation", "training"})
SECTIONS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name not in OTHER_SECTIONS)

_programs: collections.OrderedDict[tuple[Any, ...], Any] = collections.OrderedDict()


def install() -> None:
  """Lets `CompiledSteps` take what was compiled before."""
  compilation.make_step = SharedStep


def clear() -> None:
  """Gives back all programs."""
  _programs.clear()


@dataclasses.dataclass(frozen=True)
class SharedStep:
  """Stands for the jitted step that `make_step` makes of the same arguments."""

  learner: Learner
  update_policy: bool = True
  rows: int = 0

  def lower(self, *arguments: Any) -> Compilable:
    """Nothing is traced before it is known to be new."""
    return Compilable(lambda: self._make().lower(*arguments).compile(), self._key(arguments))

  def _make(self) -> Any:
    return setup.make_step(self.learner, update_policy=self.update_policy, rows=self.rows)

  def _key(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    networks = filter(None, (self.learner.policy, self.learner.critic))
    leaves, structure = jax.tree.flatten(arguments)
    sections = tuple(repr(getattr(self.learner.config, name)) for name in SECTIONS)
    frozen = tuple(network.frozen for network in networks)
    return sections, frozen, self.update_policy, self.rows, structure, tuple(leaves)


@dataclasses.dataclass(frozen=True)
class Compilable:
  """A step with its arguments, still to be compiled."""

  make: Callable[[], Any]
  key: tuple[Any, ...]

  def compile(self) -> Any:
    """The program, new or not."""
    program = _programs.pop(self.key, None) or self.make()
    _programs[self.key] = program
    while len(_programs) > KEPT:
      _programs.popitem(last=False)
    return program
