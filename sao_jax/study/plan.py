"""A study: the runs that answer a question, by name."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from sao_jax.configuration import config_tree
from sao_jax.configuration.module_file import load_module
from sao_jax.errors import ConfigError
from sao_jax.study.measures import split_measure

Fields = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # of a folder


class Run(NamedTuple):
  """One run of a study: a variant with a seed."""

  variant: str
  seed: int

  @property
  def folder(self) -> str:
    """Its folder below the study's."""
    return f"{self.variant}/seed_{self.seed}"


@dataclasses.dataclass(frozen=True)
class Study:
  """Variants of one configuration, each with every seed.

  Attributes:
    name: of the study.
    question: one sentence, the claim that it tests.
    config: a file with `get_config()`, as `--config` takes it.
    variants: what each one sets, by the dotted paths of fields; `sao_jax.configuration.methods.METHODS` has some.
    seeds: of all variants.
    fields: what all runs set.
    start: phases that the variants of a seed share, so that they begin with the same networks.
    cold: variants whose critic begins as a copy of the policy, without the value pretraining of their start.
    baseline: the variant that the others are compared with; the first one if it is "".
    pictures: metrics that are drawn.
    measures: what the table compares, see `sao_jax.study.measures`; the first one is what the question asks for.
  """

  name: str
  question: str
  config: str
  variants: Mapping[str, Fields]
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
  fields: Fields = dataclasses.field(default_factory=dict)
  start: tuple[Literal["sft", "pretrain_value"], ...] = ("sft", "pretrain_value")
  cold: tuple[str, ...] = ()
  baseline: str = ""
  measures: tuple[str, ...] = ("heldout_success",)
  pictures: tuple[str, ...] = ("heldout_success", "reward_mean")

  def __post_init__(self):
    named = [self.name, *self.variants]
    wrong = [name for name in named if not _NAME.fullmatch(name) or name == "start"]
    if wrong or not self.variants or not self.seeds:
      problem = f"{wrong} cannot be folders" if wrong else "there is nothing to run"
      raise ConfigError("--suite", f"{problem}.", "Name variants by letters, digits, _, - and ., and seeds.")
    for field, name in [("baseline", self.compared_with), *(("cold", name) for name in self.cold)]:
      if name not in self.variants:
        raise ConfigError(field, f"there is no {name!r}.", config_tree.nearest(name, tuple(self.variants)))
    for measure in self.measures:
      split_measure(measure)

  @property
  def runs(self) -> Iterator[Run]:
    """Seed by seed, so that a study that was stopped early has whole seeds."""
    return (Run(variant, seed) for seed in self.seeds for variant in self.variants)

  def fields_of(self, variant: str) -> dict[str, Any]:
    """All that the runs of a variant set."""
    return dict(self.fields) | dict(self.variants[variant])

  @property
  def compared_with(self) -> str:
    """The variant that the others are compared with."""
    return self.baseline or next(iter(self.variants))


def load_study(path: str | os.PathLike) -> Study:
  """Runs `get_study()` of a Python file.

  Raises:
    ConfigError: there is no such file, or it has no study.
  """
  module = load_module(pathlib.Path(path)) if pathlib.Path(path).is_file() else None
  if module is None:
    raise ConfigError("--suite", f"there is no Python file {path}.", "Name one, as in configs/studies/methods.py.")
  study = module.get_study() if hasattr(module, "get_study") else None
  if not isinstance(study, Study):
    raise ConfigError("--suite", f"{path} has no get_study() that returns a sao_jax.study.Study.", "Add one.")
  return study
