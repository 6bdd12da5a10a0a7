"""The address of a server: on this machine alone, unless clients need a key."""

from __future__ import annotations

import ipaddress
import socket

from absl import logging

from sao_jax.errors import ConfigError


def listen(host: str, port: int, *, keyed: bool, owner: str = "") -> socket.socket:
  """Returns a socket that listens, port 0 for a free one; `owner` stands before the names of fields in errors.

  Raises:
    ConfigError: the address is not free or not of this machine, others could come in and are not `keyed`, or the
      packages of the server are missing.
  """
  try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
  except ImportError as error:
    raise ConfigError("gateway", f"A package is not installed ({error}).", "Run: pip install -e '.[serve]'") from error
  if not _is_loopback(host):
    if not keyed:
      remedy = "Set a key, or listen on 127.0.0.1."
      raise ConfigError(f"{owner}host", f"{host} can be reached from other machines.", remedy)
    logging.warning("other machines reach this server at %s, and what they send is not encrypted", host)
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    return socket.create_server((host, port), family=family, backlog=2048)
  except (OSError, OverflowError) as error:
    problem = f"cannot listen on {host}, port {port}: {error}."
    raise ConfigError(f"{owner}port", problem, "Take another port, or 0 for a free one.") from error


def _is_loopback(host: str) -> bool:
  if host == "localhost":
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False
