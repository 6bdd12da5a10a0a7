"""A following process of a sampler whose mesh spans several: it makes the calls that the leader sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from sao_jax.errors import RunError
from sao_jax.interrupt import POLL
from sao_jax.parallel.group_channel import Channel
from sao_jax.parallel.params import Params
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.group_plan import CALLS, FREE, TURN, WeightsName, decode


@runtime_checkable
class Surroundings(Protocol):
  """All that the calls of a plan need besides an engine."""

  def weights(self, version: int) -> Params: ...
  def free(self, versions: list[int]) -> None: ...
  def take_turn(self, name: str) -> None: ...


def follow(engine: Engine, receive: Callable[[], bytes | None], surroundings: Surroundings) -> None:
  """Makes the calls of a leader's plan, in its order, until it ends.

  Args:
    engine: like the leader's: the same sizes and seed, and the other parts of the same mesh.
    receive: the next message of the plan; None at its end. May raise.
    surroundings: where weights are, and who has a turn.
  """
  while (message := receive()) is not None:
    for name, arguments in decode(message):
      if name == TURN:
        surroundings.take_turn(*arguments)
      elif name == FREE:
        surroundings.free(*arguments)
      elif name == "publish":
        (version,) = arguments
        engine.publish(surroundings.weights(version), version)
      elif name == "warm_up":
        engine.warm_up(prefixes=arguments[0])
      elif name in CALLS:
        getattr(engine, name)(*(_known(argument, surroundings) for argument in arguments))
      else:
        raise RunError(
          f"The leader of this sampler calls {name!r}, which is unknown here. Run one version of the code."
        )


def _known(argument: Any, surroundings: Surroundings) -> Any:
  """An argument of an engine; fixed weights are those that this process has of that version."""
  if not isinstance(argument, WeightsName):
    return argument
  key = jax.random.wrap_key_data(jnp.array(argument.key, jnp.uint32))
  return Weights(surroundings.weights(argument.version), argument.version, key)


class FollowingService:
  """The place of a `SamplerService` in a process that follows; a context manager. A thread follows the plan.

  The process calls `turn` and `publish` as its leader does, in the same order. It has no requests: nobody can sample
  here.
  """

  def __init__(self, engine: Engine, channel: Channel):
    """Takes over an engine that was made as the leader's, and the channel that leads to it."""
    self._engine, self._channel = engine, channel
    self._params = {engine.version: engine.params}
    self._freed: set[int] = set()
    self._changed = threading.Condition()
    self._at: str | None = None  # the turn that the plan has come to
    self._stopping, self._ended = False, None
    self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

  def start(self) -> FollowingService:
    """Starts the thread and returns the service itself."""
    self._channel.on_failure(self._end)
    self._thread.start()
    return self

  def wait(self, look: Callable[[], object] = lambda: None) -> None:
    """Waits for the end of the plan, which is the leader's `stop`, or a fault; calls `look` now and then."""
    with self._changed:
      self._stopping = True
      self._changed.notify_all()
    while self._thread.is_alive() and self._ended is None:
      self._thread.join(POLL)
      look()

  def stop(self) -> None:
    """Waits for the end of the plan, and takes leave of the leader."""
    self.wait()
    if self._ended is None:
      self._channel.close()
    else:
      self._channel.fail(self._ended)

  def __enter__(self) -> FollowingService:
    return self.start()

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
    if error is not None:
      self._end(error)  # nothing that the leader sends can be done any more
    self.stop()

  @property
  def error(self) -> BaseException | None:
    """The fault that ended the service; None while it runs, and after `stop`."""
    return self._ended

  @property
  def version(self) -> int:
    """Policy version of the next dispatch."""
    return self._engine.version

  @contextlib.contextmanager
  def turn(self, name: str) -> Iterator[None]:
    """Waits until the plan has come to the leader's turn of this name, which lasts as long as the body.

    Raises:
      BaseException: the fault that ended the service.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._at is not None or self._ended is not None)
      if self._ended is None and self._at != name:
        self._ended = RunError(f"The leader of this sampler has a turn for {self._at!r}, this process for {name!r}.")
        self._changed.notify_all()
      if self._ended is not None:
        raise self._ended
    try:
      with self._channel.explained():
        yield
    finally:
      with self._changed:
        self._at = None
        self._changed.notify_all()

  def publish(self, params: Params, version: int) -> None:
    """Keeps this process's part of new weights until the leader's scheduler takes them over.

    Raises:
      ConfigError: the parameters are of another model.
      BaseException: the fault that ended the service.
    """
    if self._ended is not None:
      raise self._ended
    self._engine.check_params(params)
    with self._changed:
      if version not in self._freed:
        self._params[version] = params
      self._changed.notify_all()

  def check_params(self, params: Params) -> None:
    """Refuses parameters of another model; see `Engine.check_params`."""
    self._engine.check_params(params)

  # The thread that follows.

  def _run(self) -> None:
    try:
      follow(self._engine, self._channel.receive, self)
    except BaseException as error:  # whoever waits in the other thread must learn it
      self._end(self._channel.explain(error))
      self._channel.fail(self._ended)

  def _end(self, error: BaseException) -> None:
    with self._changed:
      self._ended = self._ended or error
      self._changed.notify_all()

  def weights(self, version: int) -> Params:
    """Waits for this process's part of a version."""
    with self._changed:
      self._wait_for(lambda: version in self._params, f"version {version}, which nobody publishes here")
      return self._params[version]

  def free(self, versions: list[int]) -> None:
    """Forgets weights that the leader has forgotten."""
    with self._changed:
      self._freed.update(versions)
      for version in versions:
        self._params.pop(version, None)

  def take_turn(self, name: str) -> None:
    """Waits until the process's other thread has had its turn."""
    with self._changed:
      self._at = name
      self._changed.notify_all()
      self._wait_for(lambda: self._at is None, f"a turn for {name!r}, which nobody takes here")

  def _wait_for(self, done: Callable[[], bool], what: str) -> None:
    self._changed.wait_for(lambda: done() or self._stopping or self._ended is not None)
    if self._ended is not None:
      raise self._ended
    if not done():
      raise RunError(f"The leader of this sampler goes on with {what}: it has stopped already.")
