"""Phases of a run up to the moment in which work would begin, with the arguments of everything that they have made."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest
from absl import flags

from sao_jax import run_lock
from sao_jax.algorithm import advantage, network, optimizer, policy_loss, train_step, value_loss
from sao_jax.checkpoints import checkpointer
from sao_jax.config import RunConfig
from sao_jax.data.prompts import make_prompt_iterator
from sao_jax.episode import EnvironmentFailure
from sao_jax.errors import ConfigError
from sao_jax.evaluation import audit, fixed_policy, pinned
from sao_jax.learner import batches, packing, setup
from sao_jax.models import critic, policy, router, transformer
from sao_jax.parallel import mesh
from sao_jax.report import episode_samples, run_log, success_rate
from sao_jax.rollout import buffer, difficulty, ledger, rollout_loop, runner
from sao_jax.rollout.calls import call_environment
from sao_jax.sampler import engine, sampling
from sao_jax.training import consumed, loop, phases, profile, rollouts, sft
from toys import training_toy
from toys.trajectories import make_trajectories
from toys.wired_fields import EVALUATE, PRETRAIN, SAMPLE, SFT, TRAIN

# Recorded: what a phase makes of the configuration.
MADE = (
  *(checkpointer.Checkpointer, run_log.RunLog, episode_samples.EpisodeSamples, pinned.PinnedEvaluation),
  *(buffer.TrajectoryBuffer, ledger.Ledger, rollout_loop.RolloutLoop, runner.EpisodeRunner, rollouts.Rollouts),
  *(difficulty.DifficultyFilter,),
  *(engine.Engine, sampling.SamplingRule, value_loss.ScalarHead, value_loss.HLGaussHead, phases.Phase, profile.Profile),
)
CALLED = (
  *(transformer.param_specs, critic.critic_specs, policy.make_policy_apply, critic.make_critic_apply),
  *(critic.frozen_critic_paths, mesh.make_mesh, train_step.make_train_step, network.gradient_step),
  *(network.map_micro_batches, policy_loss.trust_region, advantage.one_minus_lambda, advantage.packed_returns),
  *(advantage.masked_whiten, advantage.value_targets, router.update_router_bias, packing.pack, make_prompt_iterator),
  *(critic.critic_params_from_policy, success_rate.success, optimizer.make_optimizer, call_environment),
  *(run_lock.run_lock,),
)


class Built(BaseException):
  """The phase has made everything, and would begin to work."""


class Calls:
  """The arguments of recorded functions and constructors, defaults included, by the name of what was called."""

  def __init__(self, patch: pytest.MonkeyPatch):
    self._patch = patch
    self.made: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)

  def of(self, where: str) -> list[Any]:
    """What was given at "name.argument.attribute...": by every call, or with "name[i]." by one of them."""
    name, index, path = re.fullmatch(r"(\w+)(?:\[(-?\d+)\])?\.(.+)", where).groups()
    calls = self.made[name] if index is None else [self.made[name][int(index)]]
    argument, *rest = path.split(".")
    return [functools.reduce(getattr, rest, arguments[argument]) for arguments in calls]

  def note(self, called: str, arguments: Mapping[str, Any]) -> None:
    """Records a call."""
    self.made[called].append(arguments)

  def constructor(self, kind: type) -> None:
    """Records what objects of a class are made of."""
    self._patch.setattr(kind, "__init__", self._recorded(kind.__init__, kind.__name__))

  def function(self, original: Callable, instead: Callable | None = None) -> None:
    """Records the calls of a function, wherever it was imported to; `instead` is called in its place."""
    recorded = self._recorded(original, original.__name__, instead)
    for module in list(sys.modules.values()):
      if getattr(module, "__name__", "").startswith(("sao_jax", "launch", "optax")):
        for name, value in list(vars(module).items()):
          if value is original:
            self._patch.setattr(module, name, recorded)

  def _recorded(self, original: Callable, name: str, instead: Callable | None = None) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def recorded(*positional: Any, **named: Any) -> Any:
      bound = signature.bind(*positional, **named)
      bound.apply_defaults()
      self.note(name, bound.arguments)
      return (instead or original)(*positional, **named)

    return recorded


@dataclasses.dataclass(frozen=True)
class Watched(training_toy.Parity):
  """The toy environment, which notes for which split and seed prompts are wanted."""

  note: Callable = dataclasses.field(default=lambda *unused: None, compare=False)

  def prompts(self, tokenizer, split, seed):
    self.note(split, seed)
    return super().prompts(tokenizer, split, seed)


class TracedSteps:
  """In place of the compiled steps: makes those that are wanted, and traces one full step."""

  def __init__(self, learner, update_policy):
    steps = {kind: setup.make_step(learner, update_policy=kind) for kind in sorted(update_policy)}
    rows = list(batches.abstract_rows(learner))
    if True in steps:
      jax.eval_shape(steps[True], setup.abstract_state(learner), rows[0])

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    pass


def zeros(specs, layout, *unused):
  """Parameters that need no compiler."""
  sharded = setup.sharded_specs(specs, layout)
  return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), sharded)


def loaded(directory, network, abstract, **unused):
  """Parameters in place of a checkpoint's."""
  return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract)


def stop(*unused, **also):
  """Ends a phase that is built."""
  raise Built


async def fail(runner, rollout):
  """No episode is run."""
  raise EnvironmentFailure(rollout.prompt.key.environment, "it is not run")


def build(phase: str, config: RunConfig) -> Calls:
  """Begins a phase, and returns what it has made until it would sample, compile or train."""
  with _stubs(phase) as (calls, patch):
    patch.setattr(loop, "CompiledSteps", TracedSteps)
    patch.setattr(rollout_loop.RolloutLoop, "start", stop)
    note = lambda split, seed: calls.note(f"{split}_prompts", {"seed": seed})
    _begin(phase, dataclasses.replace(config, environment=Watched(note=note)), patch)
  return calls


def failing_run(config: RunConfig, where: str) -> list[int]:
  """Trains without a device; the second step fails. Returns the steps that are saved.

  `where`: "the step", "its end" on the rollout side, or "the next wait" for a batch.
  """

  def fails(place: str, result: Any) -> Callable:
    calls = itertools.count()

    def call(*unused: Any, **also: Any) -> Any:
      if place == where and next(calls):
        raise RuntimeError(place)
      return result

    return call

  state = types.SimpleNamespace(policy=types.SimpleNamespace(params={}))
  step = fails("the step", (state, {}))

  class Steps(TracedSteps):
    def __init__(self, *unused: Any):
      self.wait, self.run = (lambda rows, **options: True), step

    def __call__(self, *arguments: Any, **options: Any) -> Any:
      return self.run()

  with _stubs(TRAIN) as (calls, patch):
    patch.setattr(loop, "CompiledSteps", Steps)
    patch.setattr(loop, "make_publisher", lambda learner: lambda params: params)
    patch.setattr(loop, "make_service", lambda *args, **options: contextlib.nullcontext())
    patch.setattr(rollout_loop.RolloutLoop, "start", lambda rollout_loop: None)
    batch = batches.Batch(make_trajectories()[:1], None)
    patch.setattr(rollouts.Rollouts, "take", fails("the next wait", batch))
    patch.setattr(rollouts.Rollouts, "consumed", lambda rollouts, trajectories: {})
    patch.setattr(rollouts.Rollouts, "end_step", fails("its end", None))
    patch.setattr(
      checkpointer.Checkpointer, "save", lambda self, step, *state, turn: calls.note("save", {"step": step})
    )
    with tempfile.TemporaryDirectory() as workdir, pytest.raises(RuntimeError, match=where):
      loop.train(config, workdir, validated=True)
  return calls.of("save.step")


@contextlib.contextmanager
def _stubs(phase: str) -> Iterator[tuple[Calls, pytest.MonkeyPatch]]:
  """No compiler, no checkpoint, no episode: what is called is recorded, and an audit compares nothing."""
  with pytest.MonkeyPatch.context() as patch:
    calls = Calls(patch)
    for kind in MADE:
      calls.constructor(kind)
    for function in (*CALLED, optax.adamw, optax.clip_by_global_norm):
      calls.function(function)

    calls.function(setup.init_sharded, zeros)
    calls.function(checkpointer.load_params, loaded)
    audited = lambda *unused, **also: (make_trajectories()[:4], [])
    calls.function(fixed_policy.run_episodes, None if phase in (EVALUATE, SAMPLE) else audited)
    calls.function(audit.compare, lambda *args: 0.0)
    of_params = lambda learner, params, *more: types.SimpleNamespace(policy=types.SimpleNamespace(params=params))
    calls.function(setup.make_state, of_params)
    calls.function(setup.make_network_state, lambda network, layout, params: params)
    calls.function(sft.make_sft_step, lambda policy, micro_batches: stop)
    patch.setattr(engine.Engine, "warm_up", lambda engine, **options: calls.note("warm_up", options))
    patch.setattr(pinned.PinnedEvaluation, "start", lambda evaluation, *begun: calls.note("evaluated", {}))
    patch.setattr(consumed.Record, "forget_after", lambda record, step: calls.note("forget_after", {"step": step}))
    patch.setattr(runner.EpisodeRunner, "run", fail)
    yield calls, patch


def program_module(name: str) -> types.ModuleType:
  """A program as a module; its flags are forgotten, since two programs have flags of the same name.

  Those of a program that was imported before stay as they are.
  """
  by_module = flags.FLAGS.flags_by_module_dict()
  kept = {flag.name: flag for module, own in by_module.items() if module.startswith("launch.") for flag in own}
  flags.FLAGS.remove_flag_values(kept)
  known = set(flags.FLAGS)
  module = importlib.import_module(f"launch.{name}")
  flags.FLAGS.remove_flag_values(set(flags.FLAGS) - known)
  for flag in kept.values():
    flags.FLAGS[flag.name] = flag
  return module


def _begin(phase: str, config: RunConfig, patch: pytest.MonkeyPatch) -> None:
  """Calls what the program of a phase calls, until it would work."""
  with tempfile.TemporaryDirectory() as workdir:
    if phase in (SFT, PRETRAIN, TRAIN):
      begin = {SFT: sft.sft, PRETRAIN: loop.pretrain_value, TRAIN: loop.train}[phase]
      with pytest.raises(Built):
        begin(config, workdir, validated=True)
      return

    program = program_module(phase)
    for flag, value in (("_PHASE", ""), ("_STEP", ""), ("_SUITE", ""), ("_PROMPT", 0), ("_TEMPERATURE", 0.25)):
      if hasattr(program, flag):
        patch.setattr(program, flag, types.SimpleNamespace(value=value))
    with contextlib.suppress(ConfigError, SystemExit):  # no episode was run
      program.main(config, workdir)
