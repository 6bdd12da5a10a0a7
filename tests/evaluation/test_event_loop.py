"""A coroutine in an event loop in the background: whatever happens in that loop ends it, as itself."""

from __future__ import annotations

import asyncio

import pytest

from sao_jax.evaluation.event_loop import run_in_background


class Original(BaseException):
  """Raised somewhere in the loop."""


def in_a_task(error):
  async def fault():
    raise error

  return asyncio.get_running_loop().create_task(fault())


def in_a_callback(error):
  def fault():
    raise error

  return asyncio.get_running_loop().call_soon(fault)


@pytest.mark.parametrize(
  "where, error",
  [
    (in_a_task, SystemExit(3)),
    (in_a_task, KeyboardInterrupt()),
    (in_a_callback, SystemExit(3)),
    (in_a_callback, Original()),
    (in_a_callback, ValueError()),
  ],
)
def test_what_nobody_awaits_ends_it_all_the_same(where, error):
  async def wait():
    kept = where(error)
    await asyncio.sleep(3600)
    return kept

  with pytest.raises(type(error)) as caught:
    run_in_background(wait())
  assert caught.value is error
