"""A sampler service as the gateway sees it: turns of fresh sessions, awaited in the gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from sao_jax.config import SamplerConfig
from sao_jax.errors import ConfigError
from sao_jax.gateway.exchange import UNAVAILABLE, RequestRefused
from sao_jax.gateway.request_fields import refuse
from sao_jax.gateway.sampler_backend import Sampled
from sao_jax.sampler.requests import Completion, GenerateRequest, ServiceStoppedError
from sao_jax.sampler.service import SamplerService


class ServedSampler:
  """The `TokenSampler` of a service; its policy may be replaced by `publish` at any time, between two tokens."""

  def __init__(self, service: SamplerService, config: SamplerConfig, vocab_size: int):
    """Takes a started service, its settings, and the number of token ids."""
    self._service = service
    self.context_length, self.top_p, self.vocab_size = config.context_length, config.top_p, vocab_size

  def health(self) -> dict[str, Any]:
    """Facts for `/health`. Raises RequestRefused when the sampler has failed."""
    if self._service.error is not None:
      raise _unavailable()
    stats = self._service.stats()
    names = ("queued_turns", "decoding_turns", "free_slots", "sampled_tokens")
    return {"policy_version": self._service.version} | {name: stats[name] for name in names}

  async def sample(
    self,
    prompt_ids: Sequence[int],
    *,
    rollout_id: int,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float,
    on_tokens: Callable[[Sequence[int]], bool] | None = None,
  ) -> Sampled:
    """Samples one turn; see `TokenSampler.sample`."""
    # A session of its own, which ends with this turn.
    taken = _Taken(on_tokens)
    request = GenerateRequest(
      self._service.new_session(),
      rollout_id,
      prompt_ids,
      max_tokens,
      stop_ids,
      temperature,
      on_tokens=None if on_tokens is None else taken.from_sampler,
    )

    # The turn ends by itself, or `on_tokens` has seen enough.
    turn = asyncio.ensure_future(self._service.generate(request))
    try:
      await asyncio.wait({turn, taken.stopped}, return_when=asyncio.FIRST_COMPLETED)
      if not turn.done():
        return taken.sampled()
      return _sampled(await turn)

    # Errors as clients know them.
    except ConfigError as error:
      raise refuse(error.field, error.problem) from error
    except asyncio.CancelledError:
      raise
    except Exception as error:  # what ended the sampler ends all its turns
      if not isinstance(error, ServiceStoppedError):
        logging.error("the sampler has ended: %r", error)
      raise _unavailable() from error
    finally:
      turn.cancel()  # which releases the session
      taken.stopped.cancel()


class _Taken:
  """Tokens that have come so far, handed from the sampler's thread to an event loop.

  Attributes:
    stopped: done once `on_tokens` has returned False.
  """

  def __init__(self, on_tokens: Callable[[Sequence[int]], bool] | None):
    self._loop, self._on_tokens = asyncio.get_running_loop(), on_tokens
    self.stopped: asyncio.Future[None] = self._loop.create_future()
    self._token_ids, self._logprobs, self._versions = [], [], []

  def from_sampler(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
    """Takes tokens in the sampler's thread, which nothing here may end: the loop may have ended before."""
    with contextlib.suppress(RuntimeError):
      self._loop.call_soon_threadsafe(self._take, token_ids, logprobs, version)

  def _take(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
    if self.stopped.done():
      return
    self._token_ids += token_ids
    self._logprobs += logprobs
    self._versions += [version] * len(token_ids)
    if not self._on_tokens(token_ids):
      self.stopped.set_result(None)

  def sampled(self) -> Sampled:
    """The tokens that have come."""
    return Sampled(self._token_ids, self._logprobs, self._versions, "stop")


def _sampled(completion: Completion) -> Sampled:
  return Sampled(completion.token_ids, completion.logprobs, completion.policy_versions, completion.finish_reason)


def _unavailable() -> RequestRefused:
  return RequestRefused(503, "The sampler has ended.", kind=UNAVAILABLE, code="sampler_ended")
