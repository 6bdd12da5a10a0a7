"""From what a phase begins: the newest checkpoint of a phase before it, model.checkpoint, or nothing at all."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import logging

from sao_jax.checkpoints.checkpointer import Checkpointer
from sao_jax.config import RunConfig
from sao_jax.configuration.paths import expand, in_bucket
from sao_jax.huggingface.folder import is_hf_folder
from sao_jax.parallel.agreement import all_processes


@dataclasses.dataclass(frozen=True)
class Origin:
  """The place that a network's parameters come from.

  Attributes:
    folder: checkpoints, or a Hugging Face folder; None for random initialisation.
    step: the newest checkpoint; None where there is none.
  """

  folder: pathlib.Path | None = None
  step: int | None = None

  def __str__(self) -> str:
    if self.folder is None:
      return "random initialisation"
    return str(self.folder) if self.step is None else f"{self.folder.name}, step {self.step} ({self.folder})"

  @property
  def name(self) -> str:
    """A short form to remember, without the place of the run's folder: "sft/300"."""
    return "" if self.folder is None else f"{self.folder.name}/{'' if self.step is None else self.step}"


def latest_step(directory: pathlib.Path) -> int | None:
  """Returns the step of the newest checkpoint, as the first of all processes sees it; None without one."""
  newest = None
  if directory.is_dir():
    with Checkpointer(directory) as checkpointer:
      newest = checkpointer.latest_step()
  # A run beside may save a newer one meanwhile: processes that load together must not mix two.
  return all_processes().first("the newest checkpoint", newest)


def policy_origin(config: RunConfig, workdir: pathlib.Path, earlier: Sequence[str]) -> Origin:
  """Finds the policy that a phase begins from.

  It is that of the first of the `earlier` phases with a checkpoint, else that of model.checkpoint, else random.
  """
  for name in earlier:
    step = latest_step(workdir / name)
    if step is not None:
      return Origin(workdir / name, step)
  if not config.model.checkpoint:
    return Origin()
  folder = expand(config.model.checkpoint)
  return Origin(folder, None if is_hf_folder(folder) else latest_step(folder))


def critic_origin(config: RunConfig, workdir: pathlib.Path, phase: str, policy: Origin) -> Origin | None:
  """Finds the trained critic that a phase takes over; None without one.

  RL goes on from the critic of value pretraining. A policy that comes from another run (model.checkpoint) brings the
  critic that stands beside it.
  """
  pretrained = workdir / "value_pretraining"
  if phase == "train" and (step := latest_step(pretrained)) is not None:
    return Origin(pretrained, step)
  of_other_run = policy.step is not None and policy.folder == expand(config.model.checkpoint)
  return policy if of_other_run and (policy.folder / str(policy.step) / "critic").is_dir() else None


def warn_without_imitation(workdir: pathlib.Path, origin: Origin) -> None:
  """Warns of a policy that begins RL, or is rolled out for the critic, without having learned anything."""
  if origin.folder is None:
    logging.warning(
      "Nothing has taught the policy anything yet: there is no %s and no model.checkpoint. Unless that is meant, run "
      "launch.sft first, or name a model in model.checkpoint.",
      workdir / "sft",
    )


def warn_if_overtaken(folder: pathlib.Path, step: int, began_from: str | None, now: Origin) -> None:
  """Warns that a phase's policy is not the one that the phase would begin from today.

  Args:
    folder: the checkpoints of the phase.
    step: the newest one.
    began_from: the name of the phase's own origin; None where the checkpoint does not tell (it is of an older version),
      and the times of the files must.
    now: the origin that it would have today.
  """
  if began_from is None:
    there = now.folder is not None and now.step is not None and (now.folder / str(now.step)).is_dir()
    there = there and not in_bucket(now.folder) and not in_bucket(folder)  # whose folders have no times
    overtaken = there and (now.folder / str(now.step)).stat().st_mtime > (folder / str(step)).stat().st_mtime
  else:
    overtaken = began_from != now.name
  if overtaken:
    logging.warning(
      "%s began from %s, and today it would begin from %s, which this phase ignores: it takes the policy of %s, which "
      "the critic belongs to. To take the newer one, move %s away and run launch.pretrain_value again.",
      folder.name,
      {None: "an older policy", "": Origin()}.get(began_from, began_from),
      now,
      folder.name,
      folder,
    )


def warn_of_later_phases(workdir: pathlib.Path, phase: str, later: Sequence[str]) -> None:
  """Warns that a phase with steps to go is of no use to the phases behind it, which have begun."""
  for name in later:
    step = latest_step(workdir / name)
    if step is not None:
      logging.warning(
        "%s has begun already (step %d), and what %s learns from now on does not reach it. To begin it again, move %s "
        "away.",
        name,
        step,
        phase,
        workdir / name,
      )
