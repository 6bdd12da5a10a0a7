"""The phases of a run and where each starts: SFT, value pretraining, RL; each has a folder of checkpoints."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from sao_jax.checkpoints.checkpointer import Checkpointer, load_host_state, load_params
from sao_jax.checkpoints.retention import best_steps, kept_steps
from sao_jax.config import RunConfig
from sao_jax.errors import ConfigError
from sao_jax.huggingface.folder import is_hf_folder
from sao_jax.huggingface.load import import_policy
from sao_jax.learner.lora_start import add_fresh_lora, check_lora_scale, fresh_critic
from sao_jax.learner.restoring import restore_state
from sao_jax.learner.setup import Learner, abstract_state, init_policy_params, make_state, sharded_specs
from sao_jax.report.metrics import measured_success
from sao_jax.training.origins import (
  Origin,
  critic_origin,
  latest_step,
  policy_origin,
  warn_if_overtaken,
  warn_of_later_phases,
  warn_without_imitation,
)
from sao_jax.training.plateau import plateaued
from sao_jax.types import PyTree, TrainState

PHASES = SFT, VALUE_PRETRAINING, TRAIN = "sft", "value_pretraining", "train"
HELDOUT_VARIANCE = "heldout_explained_variance"  # the metric by which value pretraining ends; a list in checkpoints
CRITIC_PRETRAINED = "critic_pretrained"  # in the host state of a checkpoint: how RL began
POLICY_ORIGIN = "policy_origin"  # in the host state, too: the name of the policy's `Origin`
BASE = "base"  # no phase: what model.checkpoint names


@dataclasses.dataclass(frozen=True)
class Phase:
  """Train steps in order: first critic-only ones, then full ones.

  Attributes:
    name: name of its folder and of its metrics.
    critic_steps: how many steps leave the policy alone (at most, if `until_plateau`).
    policy_steps: how many full steps follow, which is the last policy version.
    until_plateau: end early once explained variance no longer rises.
  """

  name: str
  critic_steps: int
  policy_steps: int
  until_plateau: bool = False

  @property
  def steps(self) -> int:
    """Train steps in all."""
    return self.critic_steps + self.policy_steps

  def updates_policy(self, step: int) -> bool:
    """Tells if the train step after `step` steps is a full one."""
    return step >= self.critic_steps

  def kinds(self, step: int) -> frozenset[bool]:
    """Returns the kinds of steps still to come after `step` steps: False critic-only, True full."""
    return frozenset(self.updates_policy(each) for each in (step, self.steps - 1) if step <= each)

  def version(self, step: int) -> int:
    """Returns the policy version after `step` train steps: the number of policy updates among them."""
    return max(0, step - self.critic_steps)


@dataclasses.dataclass(frozen=True)
class Start:
  """A process's starting point in a phase.

  Attributes:
    step: train steps done.
    state: the train state after them.
    rollouts: state of the rollout side, as (JSON, arrays); None at the beginning.
    heldout_variance: every explained variance that was measured on held-out rollouts.
    critic_pretrained: True if the critic had been trained when the phase began; stays what it was on resume.
    policy_origin: name of the origin of the policy that the phase began from; None where an old checkpoint lacks it.
  """

  step: int
  state: TrainState
  rollouts: Sequence[Any] | None = None
  heldout_variance: Sequence[float] = ()
  critic_pretrained: bool = False
  policy_origin: str | None = None

  @property
  def restored_step(self) -> int | None:
    """Step of the checkpoint that the process goes on from; None at the phase's beginning."""
    return None if self.rollouts is None else self.step


def value_pretraining(config: RunConfig) -> Phase:
  """Critic-only steps on rollouts of the frozen initial policy."""
  return Phase(VALUE_PRETRAINING, config.value_pretraining.max_steps, 0, until_plateau=True)


def reinforcement_learning(config: RunConfig) -> Phase:
  """The critic's warm-up, then SAO."""
  return Phase(TRAIN, config.algorithm.critic_warmup_steps, config.training.steps)


def _derived_seed(config: RunConfig, phase: str, *more: int) -> int:
  sequence = np.random.SeedSequence([config.training.seed, PHASES.index(phase), *more])
  return int(sequence.generate_state(1)[0]) >> 1  # jax reads it as an int32


def prompt_seed(config: RunConfig, phase: str) -> int:
  """Seed of a phase's order of prompts; the same in all processes, which share the prompts out."""
  return _derived_seed(config, phase)


def sampler_seed(config: RunConfig, phase: str, share: int = 0) -> int:
  """Seed of the sampler's random keys; differs between phases, which count rollouts from 0, and shares of the data."""
  return _derived_seed(config, phase, 1 + share)


def ended(config: RunConfig, phase: Phase, step: int, heldout_variance: Sequence[float]) -> bool:
  """Tells whether a phase is over after `step` steps, from the explained variances that were measured on the way."""
  settings = config.value_pretraining
  if step >= phase.steps or not phase.until_plateau or step < settings.min_steps:
    return step >= phase.steps
  return plateaued(
    heldout_variance, window=settings.plateau_window, patience=settings.patience, gain=settings.plateau_gain
  )


def initial_policy(config: RunConfig, learner: Learner, workdir: pathlib.Path, earlier: Sequence[str]) -> PyTree:
  """Loads or makes the policy that a phase begins from, see `policy_origin`, and says which it is."""
  origin = policy_origin(config, workdir, earlier)
  if origin.folder is None:
    logging.info("The policy begins from %s (seed %d).", origin, config.training.seed)
    return init_policy_params(learner, config.training.seed)
  logging.info("The policy begins from %s.", origin)
  if is_hf_folder(origin.folder):
    if not learner.learns:
      return sharded_specs(learner.policy.specs, learner.layout)
    return add_fresh_lora(learner, import_policy(origin.folder, config.model, learner.mesh), config.training.seed)
  return _load_policy(learner, origin.folder, origin.step)


def _load_policy(learner: Learner, folder: pathlib.Path, step: int | None = None) -> PyTree:
  """Loads the policy from a folder of checkpoints, the newest or that of `step`; with or without LoRA's factors."""
  abstract = sharded_specs(learner.policy.specs, learner.layout)
  params = load_params(folder, "policy", abstract, step=step, optional="lora")
  if not learner.learns:
    return abstract
  check_lora_scale("model.lora", learner.config.model.lora, params)
  return add_fresh_lora(learner, params, learner.config.training.seed)


def load_networks(learner: Learner, workdir: pathlib.Path, phase: str) -> tuple[PyTree, PyTree]:
  """Loads policy and critic of the newest checkpoint of a phase with both.

  Raises:
    ConfigError: there is none.
  """
  step = latest_step(workdir / phase)
  if step is None:
    raise ConfigError("workdir", f"{workdir} holds no checkpoint of {phase}.", f"Run the program of {phase} first.")
  policy = _load_policy(learner, workdir / phase, step)
  critic = load_params(workdir / phase, "critic", sharded_specs(learner.critic.specs, learner.layout), step=step)
  return policy, learner.critic.whole(critic, policy)


def _warn_of_unfinished_sft(config: RunConfig, workdir: pathlib.Path) -> None:
  step = latest_step(workdir / SFT)
  if step is not None and step < config.sft.steps:
    logging.warning("SFT stopped at step %d of %d: run launch.sft again to finish it.", step, config.sft.steps)


def _warn_of_unfinished_value_pretraining(config: RunConfig, workdir: pathlib.Path) -> None:
  step, most = latest_step(workdir / VALUE_PRETRAINING), config.value_pretraining.max_steps
  if step is None or step >= most:
    return
  variances = (load_host_state(workdir / VALUE_PRETRAINING, step) or {}).get(HELDOUT_VARIANCE, ())
  if not ended(config, value_pretraining(config), step, variances):
    logging.warning(
      "Value pretraining stopped at step %d of at most %d, before held-out explained variance plateaued: run "
      "launch.pretrain_value again to finish it.",
      step,
      most,
    )


def initial_state(config: RunConfig, learner: Learner, workdir: pathlib.Path, phase: Phase) -> TrainState:
  """Makes the train state at step 0 of a phase: networks from the phases before it, fresh optimisers."""
  earlier = _earlier(phase)
  policy = initial_policy(config, learner, workdir, earlier)

  # Phases that are missing, unfinished, or older than what they began from.
  warn_without_imitation(workdir, policy_origin(config, workdir, earlier))
  _warn_of_unfinished_sft(config, workdir)
  step = latest_step(workdir / VALUE_PRETRAINING)
  if phase.name == TRAIN and step is not None:
    began_from = (load_host_state(workdir / VALUE_PRETRAINING, step) or {}).get(POLICY_ORIGIN)
    warn_if_overtaken(workdir / VALUE_PRETRAINING, step, began_from, policy_origin(config, workdir, [SFT]))
  return make_state(learner, policy, _initial_critic(config, learner, workdir, phase, policy))


def _earlier(phase: Phase) -> list[str]:
  """Lists the phases that a phase may begin from, the best first."""
  return [SFT] if phase.name == VALUE_PRETRAINING else [VALUE_PRETRAINING, SFT]


def _initial_critic(
  config: RunConfig, learner: Learner, workdir: pathlib.Path, phase: Phase, policy: PyTree
) -> PyTree | None:
  """Makes the critic that a phase starts from; None for methods without one."""
  if learner.critic is None:
    return None
  specs = learner.critic.specs

  # One that was trained before, here or beside the policy of another run.
  origin = _critic_origin(config, workdir, phase)
  if origin is not None:
    own = origin.folder == workdir / VALUE_PRETRAINING
    try:
      params = load_params(origin.folder, "critic", sharded_specs(specs, learner.layout), step=origin.step)
    except ConfigError as error:
      if own:
        raise
      remedy = (
        "Use that run's algorithm.value_head, algorithm.critic_reads_logprobs and critic.lora, or name a folder with "
        "its policy alone: launch.convert_hf makes one."
      )
      raise ConfigError(
        "model.checkpoint", f"the critic beside that policy does not fit: {error.problem}", remedy
      ) from error
    logging.info("The critic begins from %s.", origin)
    check_lora_scale("critic.lora", config.critic.lora, params)
    if own:
      _warn_of_unfinished_value_pretraining(config, workdir)
    return params

  # Otherwise the critic is a copy of the policy, with a new head.
  if phase.name == TRAIN:
    logging.warning("The critic was not pretrained (launch.pretrain_value): it begins as a copy of the policy.")
  else:
    logging.info("The critic begins as a copy of the policy, with a new head.")
  if not learner.learns:
    return sharded_specs(specs, learner.layout)
  return fresh_critic(learner, policy, config.training.seed)


def critic_pretrained(config: RunConfig, workdir: pathlib.Path, phase: Phase) -> bool:
  """Tells if RL that begins takes over a critic that was trained before."""
  return phase.name == TRAIN and _critic_origin(config, workdir, phase) is not None


def _critic_origin(config: RunConfig, workdir: pathlib.Path, phase: Phase) -> Origin | None:
  """Finds the trained critic that a phase takes over, see `critic_origin`; None for methods without a critic."""
  if not config.algorithm.needs_critic:
    return None
  return critic_origin(config, workdir, phase.name, policy_origin(config, workdir, _earlier(phase)))


def began_pretrained(host_state: Mapping[str, Any]) -> bool:
  """Reads from a checkpoint if its phase began with a critic that had been trained; 0.1.0, which whitened, says no."""
  return host_state.get(CRITIC_PRETRAINED, False)


def settle_objective(learner: Learner, *, critic_pretrained: bool) -> Learner:
  """Returns the learner with `algorithm.whiten_advantages=auto` resolved, by the critic that the phase began with."""
  algorithm = learner.config.algorithm
  whitens = algorithm.whitens(critic_pretrained=critic_pretrained)
  logging.info(
    "The policy's loss takes %s (algorithm.whiten_advantages=%s%s).",
    "advantages whitened over the trained tokens of each batch" if whitens else "advantages as they are",
    algorithm.whiten_advantages,
    f", the critic was {'' if critic_pretrained else 'not '}pretrained" if algorithm.needs_critic else "",
  )
  settled = dataclasses.replace(algorithm, whiten_advantages=whitens)
  return dataclasses.replace(learner, config=dataclasses.replace(learner.config, algorithm=settled))


def restore_or_begin(
  config: RunConfig, learner: Learner, workdir: pathlib.Path, phase: Phase, checkpointer: Checkpointer
) -> Start:
  """Restores the newest checkpoint of a phase, or begins the phase.

  Raises:
    ConfigError: the checkpoint belongs to a run with other critic-only steps, or another scale of LoRA.
  """
  restored = restore_state(checkpointer, abstract_state(learner))
  if restored is None or restored.step < phase.steps:
    warn_of_later_phases(workdir, phase.name, PHASES[PHASES.index(phase.name) + 1 :])
  if restored is None:
    return Start(
      0,
      initial_state(config, learner, workdir, phase),
      critic_pretrained=critic_pretrained(config, workdir, phase),
      policy_origin=policy_origin(config, workdir, _earlier(phase)).name,
    )

  step, state, host_state = restored
  logging.info("%s: going on after step %d of %d.", phase.name, step, phase.steps)
  version = host_state.get("policy_version")
  if learner.learns:
    check_lora_scale("model.lora", config.model.lora, state.policy.params)
    if state.critic is not None:
      check_lora_scale("critic.lora", config.critic.lora, state.critic.params)
    version = int(state.policy_version)
  if version not in (None, phase.version(step)):
    raise ConfigError(
      "algorithm.critic_warmup_steps",
      f"after step {step} the checkpoint has version {version}, not {phase.version(step)}.",
      "Keep the number of critic-only steps that the run began with.",
    )
  return Start(
    step,
    state,
    host_state["rollouts"],
    host_state.get(HELDOUT_VARIANCE, ()),  # 0.1.0 held nothing out
    began_pretrained(host_state),
    host_state.get(POLICY_ORIGIN),
  )


def check_critic(learner: Learner, phase: Phase) -> None:
  """Refuses critic-only steps of a method without a critic.

  Raises:
    ConfigError: naming the method.
  """
  if learner.critic is None and phase.critic_steps:
    raise ConfigError(
      "algorithm.advantage",
      f"{learner.config.algorithm.advantage!r} has no critic, and {phase.name} has {phase.critic_steps} critic-only "
      "steps.",
      "Leave launch.pretrain_value out and set algorithm.critic_warmup_steps=0, or use algorithm.advantage=sao.",
    )


class LatestPolicy(NamedTuple):
  """A policy to look at.

  Attributes:
    params: its parameters on the learner's mesh.
    version: its policy version.
    phase: the phase that it comes from.
    checkpoint: the place of it, which a run beside may have followed by newer ones.
  """

  params: PyTree
  version: int
  phase: str
  checkpoint: str

  @property
  def step(self) -> int | None:
    """Step of the checkpoint; None for what model.checkpoint names."""
    return None if self.phase == BASE else int(self.checkpoint.rpartition("/")[2])

  @property
  def identity(self) -> dict[str, Any]:
    """Phase, step and version, by which a run knows it wherever its folder lies; a base model has its place alone."""
    known = {"phase": self.phase, "step": self.step, "policy_version": self.version}
    return known | ({"checkpoint": self.checkpoint} if self.phase == BASE else {})


def latest_policy(
  config: RunConfig, learner: Learner, workdir: pathlib.Path, phase: str = "", step: str = ""
) -> LatestPolicy:
  """Loads the newest policy of a run, or another one that was kept, for evaluation and sampling.

  Args:
    config: the run's configuration.
    learner: its static half.
    workdir: the run's folder.
    phase: "train" or "sft"; "base" for what model.checkpoint names; by default the first of these that there is.
    step: the step of a checkpoint, or "best" for the one of greatest held-out success; "" for the newest.

  Raises:
    ConfigError: when there is no checkpoint, or none of this step.
  """
  if step:
    return _kept_policy(learner, *find_kept(workdir, phase, step))

  # A checkpoint of the run itself, RL before SFT.
  for name in {"": (TRAIN, SFT), BASE: ()}.get(phase, (phase,)):
    step = latest_step(workdir / name)
    while step is not None:
      try:
        return _kept_policy(learner, workdir / name, step)
      except (OSError, ValueError, KeyError):
        # A run beside may have removed it meanwhile, and saved a newer one.
        failed, step = step, latest_step(workdir / name)
        if step == failed:
          raise

  # Or the policy that the run would start from.
  if phase in ("", BASE) and config.model.checkpoint:
    if not phase:
      logging.warning("%s holds no checkpoint: this is the policy that model.checkpoint names.", workdir)
    return LatestPolicy(initial_policy(config, learner, workdir, []), 0, BASE, config.model.checkpoint)

  if phase == BASE:
    raise ConfigError("model.checkpoint", "it names no model.", "Pass --config.model.checkpoint=FOLDER.")
  raise ConfigError(
    "workdir",
    f"{workdir} holds no checkpoint of {phase or 'train or sft'}.",
    "Name the --workdir of a run, run launch.sft or launch.train first, or pass --config.model.checkpoint=FOLDER.",
  )


def newer_policy(
  config: RunConfig, learner: Learner, workdir: pathlib.Path, phase: str, than: LatestPolicy
) -> LatestPolicy | None:
  """Loads what `latest_policy` would, if a run beside has saved it after `than`; None if not, or not readable yet."""
  names = (phase,) if phase else (TRAIN, SFT)
  newest = next(((name, step) for name in names if (step := latest_step(workdir / name)) is not None), None)
  if newest in (None, (than.phase, than.step)):
    return None
  try:
    return latest_policy(config, learner, workdir, phase)
  except (OSError, ValueError, KeyError) as error:  # it may be removed already, or still on its way
    logging.warning("the checkpoint of %s, step %d, could not be read: %s", *newest, error)
    return None


def _kept_policy(learner: Learner, folder: pathlib.Path, step: int) -> LatestPolicy:
  """Loads the policy of a checkpoint of a phase."""
  version = load_host_state(folder, step)["policy_version"] if folder.name == TRAIN else 0
  return LatestPolicy(_load_policy(learner, folder, step), version, folder.name, str(folder / str(step)))


def find_kept(workdir: pathlib.Path, phase: str, step: str) -> tuple[pathlib.Path, int]:
  """Finds a checkpoint of a run by its step; without a `phase` that of RL comes before that of imitation.

  Args:
    workdir: the run's folder.
    phase: "train", "sft", or "" for any.
    step: a number, or "best": the kept checkpoint of greatest held-out success, as the metrics have it.

  Raises:
    ConfigError: there is none; it names those that there are.
  """
  if phase == BASE:
    raise ConfigError("--step", "model.checkpoint has no steps.", "Leave --step out, or name --phase=train.")
  names = (phase,) if phase else (TRAIN, SFT)
  kept = {name: kept_steps(workdir / name) for name in names}
  for name, steps in kept.items():
    known = measured_success(workdir, name) if step == "best" else {}
    found = best_steps(steps, known) if step == "best" else [each for each in steps if str(each) == step]
    if found:
      return workdir / name, found[0]

  there = ", ".join(f"{name} {each}" for name, steps in kept.items() for each in steps) or "none"
  problem = "none of the checkpoints was evaluated" if step == "best" else f"there is no checkpoint of step {step!r}"
  remedy = "Choose another; training.keep_checkpoints and training.keep_best say how many stay."
  raise ConfigError("--step", f"{problem} in {workdir}; there are: {there}.", remedy)
