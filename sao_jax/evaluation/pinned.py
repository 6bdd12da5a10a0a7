"""Held-out success of one version, measured in the background while training goes on to the next ones."""

from __future__ import annotations

import concurrent.futures
from typing import NamedTuple

from sao_jax.config import RunConfig
from sao_jax.evaluation.heldout import Evaluation, evaluate
from sao_jax.interrupt import Interrupt, Interrupted
from sao_jax.types import PyTree


class Measured(NamedTuple):
  """An evaluation, and the train step after which it began."""

  step: int
  evaluation: Evaluation


class PinnedEvaluation:
  """At most one evaluation at a time, on weights that stay as they are; a context manager.

  Attributes:
    version: the version that is being evaluated and not collected yet; None without one.
  """

  def __init__(self, config: RunConfig, interrupt: Interrupt):
    self.version: int | None = None
    self._config, self._interrupt, self._given_up = config, interrupt, False
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
    """Whether the evaluation is to stop: the process was asked to, or nobody waits for the result any more."""
    return self._given_up or self._interrupt.requested

  def start(self, params: PyTree, version: int, step: int) -> None:
    """Begins; `params`, on the sampler's devices, belong to the evaluation until it is collected.

    Raises:
      RuntimeError: the one before was not collected.
    """
    if self._result is not None:
      raise RuntimeError(f"the evaluation of version {self.version} was not collected")
    self.version, self._step = version, step
    self._result = self._thread.submit(evaluate, self._config, params, version, self)

  def check(self) -> None:
    """Raises what ended the evaluation, as itself, unless it was interrupted."""
    if self._result is not None and self._result.done():
      error = self._result.exception()
      if error is not None and not isinstance(error, Interrupted):
        raise error

  def collect(self, timeout: float = 0.0) -> Measured | None:
    """The evaluation under way, if it finishes within `timeout` seconds; None otherwise, and if there is none.

    An interrupted one stays under way: there is no result, and there will be none.

    Raises:
      Exception: what ended it, as itself.
    """
    if self._result is None or concurrent.futures.wait([self._result], timeout).not_done:
      return None
    try:
      evaluation = self._result.result()
    except Interrupted:
      return None
    self.version, self._result = None, None
    return Measured(self._step, evaluation)
