"""A policy behind OpenAI's API: its tokenizer, chat template and sampler, put together."""

from __future__ import annotations

import socket

from sao_jax.chat.conversation import ChatRenderer
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.config import RunConfig
from sao_jax.data.tokenizer import ByteTokenizer, Tokenizer
from sao_jax.errors import ConfigError
from sao_jax.evaluation.served_sampler import ServedSampler
from sao_jax.gateway.client_keys import OneKey
from sao_jax.gateway.sampler_backend import SamplerBackend
from sao_jax.gateway.server import GatewayServer
from sao_jax.sampler.service import SamplerService


def make_server(
  config: RunConfig, service: SamplerService, *, key: str = "", listener: socket.socket | None = None
) -> GatewayServer:
  """Makes the server, not started, of a run's policy.

  Args:
    config: the run's; its name is that of the model.
    service: a started sampler.
    key: that of all clients; "" lets everybody in.
    listener: a socket of `listen`; None for a free port of this machine.
  """
  tokenizer, sampler = config.environment.tokenizer(), ServedSampler(service, config.sampler, config.model.vocab_size)
  backend = SamplerBackend(
    sampler,
    tokenizer,
    model=config.name,
    renderer=_find_renderer(config, tokenizer),
    call_format=getattr(config.environment, "call_format", ""),
    stop_ids=config.environment.make(tokenizer).stop_ids,
  )
  return GatewayServer(OneKey(backend, key), listener=listener, health=sampler.health)


def _find_renderer(config: RunConfig, tokenizer: Tokenizer) -> ChatRenderer | None:
  """The chat template with the environment's options; None without one, for a base model completes texts."""
  if not isinstance(tokenizer, ByteTokenizer | HFTokenizer):
    return None
  try:
    return ChatRenderer(tokenizer, options=getattr(config.environment, "template_options", {}))
  except ConfigError as error:
    if "has no chat template" in error.problem:
      return None
    raise
