"""Held-out success of one version, measured in the background while training goes on to later versions."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection
from typing import NamedTuple

from absl import logging

from sao_jax.config import RunConfig
from sao_jax.evaluation.heldout import Evaluation, evaluate, merged
from sao_jax.interrupt import POLL, Interrupted, StopSignal
from sao_jax.parallel.agreement import ALONE, Processes
from sao_jax.parallel.process import WHOLE, DataShare
from sao_jax.sampler.follower import FollowingService
from sao_jax.sampler.service import SamplerService
from sao_jax.types import PyTree


class Measured(NamedTuple):
  """An evaluation, and the train step after which it began."""

  step: int
  evaluation: Evaluation


class PinnedEvaluation:
  """At most one evaluation at a time, on weights that stay as they are; a context manager.

  It decides which versions are evaluated: every `evaluation.every` of them, the first and the last included.

  Attributes:
    version: the version that is being evaluated and not collected yet; None without one.
    last: the evaluation that was collected last; None before.
  """

  def __init__(
    self,
    config: RunConfig,
    interrupt: StopSignal,
    *,
    last_version: int = 0,
    service: SamplerService | FollowingService | None = None,
    report: Callable[[int, Evaluation], None] = lambda step, evaluation: None,
    processes: Processes = ALONE,
    share: DataShare = WHOLE,
  ):
    """Args:
    config: the run's configuration.
    interrupt: ends an evaluation when the process is asked to stop.
    last_version: that of the phase's end, 0 for none.
    service: the rollouts' sampler, for `evaluation.sampler="shared"`.
    report: called with the step and the result of each evaluation.
    processes: all of them get the result of all.
    share: of the prompts, that this process evaluates.
    """
    self.version: int | None = None
    self.last: Evaluation | None = None
    self._config, self._interrupt, self._given_up = config, interrupt, False
    self._last_version, self._report, self._processes, self._share = last_version, report, processes, share
    self._service = service if config.evaluation.sampler == "shared" else None
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="evaluation")
    self._step = 0
    self._result: concurrent.futures.Future[Evaluation] | None = None

  def __enter__(self) -> PinnedEvaluation:
    return self

  def __exit__(self, *unused: object) -> None:
    self._given_up = True
    self._thread.shutdown()

  @property
  def requested(self) -> bool:
    """True once the evaluation is to stop: the process was asked to, or nobody waits for the result any more."""
    return self._given_up or self._interrupt.requested

  def due(self, version: int) -> bool:
    """Decides whether held-out success is measured at this version."""
    every, last = self._config.evaluation.every, self._last_version
    return last > 0 and every > 0 and (version % every == 0 or version == last)

  def begin(self, step: int, version: int, params: PyTree, measured: Collection[int]) -> None:
    """Evaluates the version that a process starts with, unless it is among those that were measured before."""
    if self.due(version) and version not in measured:
      self.start(params, version, step)

  def after(
    self, step: int, version: int, params: PyTree | None, *, saves: bool, look: Callable[[], None] = lambda: None
  ) -> None:
    """Collects what has finished, and evaluates `version` if it is due.

    Args:
      step: train steps done.
      version: the policy version after them.
      params: its weights on the sampler's devices; None if the step left the policy as it was.
      saves: a checkpoint follows. An evaluation of an older version is waited for then: its weights are in no
        checkpoint, so a resumed run could not repeat it.
      look: called now and then while waiting; may raise.
    """
    due = params is not None and self.due(version)
    self._collect_and_report(look, wait=due or (saves and self.version != version))
    if due and self.version is None:
      self.start(params, version, step)

  def finish(self, version: int, look: Callable[[], None] = lambda: None) -> None:
    """Waits for the evaluation under way. One that an interruption cut is lost unless it was of this `version`."""
    self._collect_and_report(look, wait=True)
    if self.version not in (None, version):
      logging.warning("The evaluation of version %d was interrupted: it is lost.", self.version)

  def start(self, params: PyTree, version: int, step: int) -> None:
    """Begins; `params`, on the sampler's devices, belong to the evaluation until it is collected.

    Raises:
      RuntimeError: the one before was not collected.
    """
    if self._result is not None:
      raise RuntimeError(f"the evaluation of version {self.version} was not collected")
    self.version, self._step = version, step
    options = {} if self._service is None else {"service": self._service}
    if self._processes.count > 1:
      options["share"] = self._share
    self._result = self._thread.submit(evaluate, self._config, params, version, self, **options)

  def check(self) -> None:
    """Raises the exception that ended the evaluation, as itself, unless it was interrupted."""
    if self._result is not None and self._result.done():
      error = self._result.exception()
      if error is not None and not isinstance(error, Interrupted):
        raise error

  def collect(self, timeout: float = 0.0) -> Measured | None:
    """Returns the evaluation under way if it finishes within `timeout` seconds; None otherwise, or without one.

    An interrupted one stays under way: there is no result, and there will be none.

    Raises:
      Exception: the exception that ended it, as itself.
    """
    if self._result is None:
      return None
    # A share may take minutes elsewhere, and a stop that this process is asked for is one of all.
    evaluation = merged(self._config, self._processes, self._own(timeout), lambda: self._interrupt.requested)
    if evaluation is None:
      return None
    self.version, self._result = None, None
    return Measured(self._step, evaluation)

  def _own(self, timeout: float) -> Evaluation | None:
    """The share of this process, if it finishes within `timeout` seconds; None otherwise, or if it was cut."""
    if concurrent.futures.wait([self._result], timeout).not_done:
      return None
    try:
      return self._result.result()
    except Interrupted:
      return None

  def _collect_and_report(self, look: Callable[[], None], *, wait: bool) -> None:
    """Reports the evaluation under way under the step after which it began; with `wait` not before it has finished."""
    while wait and self._result is not None and self._own(POLL) is None and not self._interrupt.requested:
      look()
    measured = self.collect()
    if measured is None:
      look()
      return
    self.last = measured.evaluation
    self._report(*measured)
