"""The pool of sandboxes: bounded, warm, each lent once, closed whatever happens."""

from __future__ import annotations

import asyncio
import functools
import re

import pytest
from toys import sandboxes
from toys.paths import REPOSITORY

from sao_jax.errors import ConfigError
from sao_jax.rewards.queueing import METER, QueueMeter
from sao_jax.sandbox import LocalSandbox, SandboxPool


class Fake:
  """A sandbox that counts how many of its kind are open."""

  open, most, made = 0, 0, 0

  def __init__(self):
    kind = type(self)
    kind.open, kind.made = kind.open + 1, kind.made + 1
    kind.most = max(kind.most, kind.open)
    self.closed = False

  async def close(self):
    await asyncio.sleep(0)
    assert not self.closed
    self.closed = True
    type(self).open -= 1


def new_kind() -> type[Fake]:
  return type("Kind", (Fake,), {"open": 0, "most": 0, "made": 0})


def starting(kind: type[Fake], seconds: float = 0.0):
  async def start():
    await asyncio.sleep(seconds)
    return kind()

  return start


def test_no_more_than_the_size_are_open_and_each_is_lent_once():
  kind = new_kind()

  async def run():
    pool, seen = SandboxPool(starting(kind), size=3, warm=2), []

    async def use():
      async with pool.sandbox() as sandbox:
        seen.append(sandbox)
        await asyncio.sleep(0.002)

    await asyncio.gather(*(use() for _ in range(20)))
    assert len({id(sandbox) for sandbox in seen}) == 20
    assert pool.stats()["lent"] == 0 and pool.stats()["asked"] == 20
    await pool.close()
    with pytest.raises(RuntimeError, match="closed"):
      await pool.acquire()
    return pool.stats()

  stats = asyncio.run(run())
  assert kind.most <= 3 and kind.open == 0
  assert stats["started"] == kind.made >= 20 and stats["failed"] == stats["warm"] == 0


def test_a_warm_one_is_lent_at_once():
  async def run():
    pool = SandboxPool(starting(new_kind(), seconds=0.2), size=4, warm=1)
    await pool.release(await pool.acquire())
    await asyncio.sleep(0.3)
    asked = asyncio.ensure_future(pool.acquire())
    for _ in range(5):
      await asyncio.sleep(0)
    assert asked.done()
    await pool.release(asked.result())
    await pool.close()

  asyncio.run(run())


def test_a_failed_start_reaches_whoever_asked_and_frees_the_place():
  starts = iter([OSError("no"), OSError("no"), None, None])
  kind = new_kind()

  async def start():
    error = next(starts)
    if error:
      raise error
    return kind()

  async def run():
    pool = SandboxPool(start, size=1, warm=0)
    for _ in range(2):
      with pytest.raises(OSError, match="no"):
        await pool.acquire()
    async with pool.sandbox():
      assert pool.stats() == {"asked": 3, "started": 1, "failed": 2, "lent": 1, "warm": 0}
    await pool.close()

  asyncio.run(run())
  assert kind.open == 0


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.03])
def test_who_is_cancelled_loses_nothing(moment):
  """While it waits for its turn, while its sandbox starts, while it uses it."""
  kind = new_kind()

  async def run():
    pool = SandboxPool(starting(kind, seconds=0.02), size=1, warm=0)

    async def use():
      async with pool.sandbox():
        await asyncio.sleep(0.02)

    users = [asyncio.ensure_future(use()) for _ in range(3)]
    await asyncio.sleep(moment)
    for user in users:
      user.cancel()
    await asyncio.gather(*users, return_exceptions=True)
    await asyncio.wait_for(use(), 30.0)
    await pool.close()
    assert pool.stats()["lent"] == 0

  asyncio.run(run())
  assert kind.open == 0 and kind.most <= 2  # one that was still starting is closed when it has started


def test_the_wait_for_a_turn_is_not_charged():
  async def run():
    pool = SandboxPool(starting(new_kind()), size=1, warm=0)
    first = await pool.acquire()
    meter = QueueMeter()
    METER.set(meter)
    second = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0.05)
    await pool.release(first)
    await pool.release(await second)
    await pool.close()
    return meter.seconds

  assert asyncio.run(run()) > 0.02


@pytest.mark.parametrize("size, warm", [(0, 0), (1, 2), (1, -1)])
def test_numbers_that_cannot_work_are_refused(size, warm):
  with pytest.raises(ConfigError):
    SandboxPool(LocalSandbox.start, size=size, warm=warm)


def test_thirty_two_real_ones_at_once_see_nothing_of_each_other():
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())

  async def run():
    pool = SandboxPool(functools.partial(LocalSandbox.start, sandboxes.SMALL), size=32, warm=4)
    together = asyncio.Barrier(32)

    async def use(index):
      async with pool.sandbox() as sandbox:
        await sandbox.write_file("mine", str(index).encode())
        await together.wait()
        result = await sandbox.run(
          ["sh", "-c", "cat /workspace/*; ls /tmp; ls /proc | grep -c '^[0-9]*$'"], timeout=120.0
        )
        # Its own file; of processes number 1, the shell and the pair that counts, as far as both have begun.
        assert result.stdout in (f"{index}3\n".encode(), f"{index}4\n".encode()), result

    await asyncio.gather(*(use(index) for index in range(32)))
    await pool.close()

  asyncio.run(run())


def test_the_examples_of_the_readme(capsys):
  if sandboxes.missing():
    pytest.skip(sandboxes.missing())
  text = (REPOSITORY / "sao_jax/sandbox/README.md").read_text()
  names = {}
  for example in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
    exec(compile(example, "README.md", "exec"), names)
  assert capsys.readouterr().out == "b'5\\n'  True\nn is 6\n42\n"
