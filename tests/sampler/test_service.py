"""The sampler's thread: many callers, their exceptions, and the end."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from toys.sampler_fakes import FakeEngine, answer

from sao_jax.config import SamplerConfig
from sao_jax.errors import ConfigError
from sao_jax.sampler.requests import GenerateRequest, ServiceStoppedError
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService

CONFIG = SamplerConfig(num_slots=3, context_length=64, decode_steps=4)


class SlowEngine(FakeEngine):
  """Waits before each dispatch until `gate` is open."""

  def __init__(self, config):
    super().__init__(config)
    self.gate = threading.Event()
    self.gate.set()

  def decode(self, num_steps, lengths, *others):
    self.gate.wait(10)
    return super().decode(num_steps, lengths, *others)


@pytest.fixture
def engine():
  return SlowEngine(CONFIG)


@pytest.fixture
def service(engine):
  with SamplerService(Scheduler(engine)) as service:
    yield service


def request(session, max_tokens=5, tokens=(1, 2), **kwargs):
  return GenerateRequest(session, session, tokens, max_tokens, **kwargs)


async def episode(service, turns):
  session, ids = service.new_session(), []
  for turn in range(turns):
    new = (session, turn)
    completion = await service.generate(request(session, 4 + turn, new, keep_slot=True))
    ids += new
    assert completion.token_ids.tolist() == answer(ids, session, 4 + turn)
    ids += completion.token_ids.tolist()
    await asyncio.sleep(0)
  service.release(session)
  return len(ids)


def wait_until(condition, seconds=5.0):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "waited in vain"
    time.sleep(0.001)


def test_several_event_loops_and_threads_at_once(service):
  lengths, errors = [], []

  def loop(count):
    async def run():
      return await asyncio.gather(*(episode(service, 3) for _ in range(count)))

    try:
      lengths.extend(asyncio.run(run()))
    except BaseException as error:  # noqa: BLE001
      errors.append(error)

  threads = [threading.Thread(target=loop, args=(count,)) for count in (5, 7)]
  for thread in threads:
    thread.start()
  for _ in range(4):
    session = service.new_session()
    assert service.generate_sync(request(session)).token_ids.tolist() == answer((1, 2), session, 5)
  for thread in threads:
    thread.join()
  assert not errors and lengths == [21] * 12
  wait_until(lambda: service.stats()["free_slots"] == 3)


def test_several_schedulers_share_the_work():
  engines = [FakeEngine(CONFIG) for _ in range(2)]
  with SamplerService(*map(Scheduler, engines)) as service:

    async def run():
      return await asyncio.gather(*(episode(service, 3) for _ in range(8)))

    assert asyncio.run(run()) == [21] * 8
    wait_until(lambda: service.stats()["free_slots"] == 6)
    assert all(any(entry[0] == "decode" for entry in engine.log) for engine in engines)
    service.publish(None, 4)
    wait_until(lambda: service.version == 4)
    assert not service._homes
    engines[0].broken = RuntimeError("one of two")
    first, second = (service.submit(request(100 + i, 30)) for i in range(2))
    wait_until(lambda: service.error is not None)
    for future in (first, second):  # whoever was not done yet fails with the error of the other
      error = future.exception(5)
      assert error is None or error is service.error


def test_an_exception_reaches_every_caller_as_itself(engine, service):  # A12
  engine.gate.clear()
  broken = RuntimeError("device lost")

  async def run():
    tasks = [asyncio.create_task(service.generate(request(service.new_session()))) for _ in range(6)]
    await asyncio.sleep(0.02)
    engine.broken = broken
    engine.gate.set()
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

  results = asyncio.run(run())
  assert all(result is broken for result in results if isinstance(result, BaseException))
  assert broken in results
  assert service.error is broken
  with pytest.raises(RuntimeError, match="device lost"):
    service.generate_sync(request(99))
  with pytest.raises(RuntimeError, match="device lost"):
    service.publish(None, 1)


def test_a_bad_request_fails_alone(service):
  with pytest.raises(ConfigError):
    service.generate_sync(request(service.new_session(), tokens=range(70)), timeout=5)
  assert len(service.generate_sync(request(service.new_session()), timeout=5).token_ids) == 5
  assert service.error is None


def test_every_scheduler_looks_at_new_parameters():
  looked, engines = [], [FakeEngine(CONFIG) for _ in range(2)]
  for number, engine in enumerate(engines):
    engine.check_params = lambda params, number=number: looked.append((number, params))
  with SamplerService(*map(Scheduler, engines)) as service:
    service.check_params("new")
  assert looked == [(0, "new"), (1, "new")]


def test_a_cancelled_caller_gives_its_slot_back(engine, service):
  engine.gate.clear()

  async def run():
    task = asyncio.create_task(service.generate(request(0, 50)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(run())
  engine.gate.set()
  wait_until(lambda: service.stats()["free_slots"] == 3)
  assert len(service.generate_sync(request(1), timeout=5).token_ids) == 5


def test_stop_ends_running_turns(engine):
  service = SamplerService(Scheduler(engine)).start()
  engine.gate.clear()
  future = service.submit(request(0, 50))
  wait_until(lambda: service.stats()["decoding_turns"] == 1)
  threading.Timer(0.02, engine.gate.set).start()
  service.stop()
  with pytest.raises(ServiceStoppedError):
    future.result(5)
  with pytest.raises(ServiceStoppedError):
    service.generate_sync(request(1))
  assert service.error is None  # it was asked for
  service.stop()  # twice is fine


def test_publish_while_sampling(engine, service):  # A2
  engine.gate.clear()
  future = service.submit(request(0, 12))
  wait_until(lambda: service.stats()["decoding_turns"] == 1)
  service.publish(None, 7)
  engine.gate.set()
  versions = future.result(5).policy_versions
  assert versions[0] == 0 and versions[-1] == 7 and np.all(np.diff(versions) >= 0)
  assert service.version == 7


def test_an_idle_service_sleeps(service):
  service.generate_sync(request(0), timeout=5)
  time.sleep(0.02)
  before = service._lanes[0].scheduler._ticks
  time.sleep(0.1)
  assert service._lanes[0].scheduler._ticks - before <= 1


def test_progress_goes_on_while_a_long_turn_is_decoded_and_while_a_program_compiles(engine, service):
  seen, decode = [], engine.decode
  engine.decode = lambda *args: seen.append(service.progress) or decode(*args)
  service.generate_sync(request(0, 40), timeout=5)
  assert len(seen) >= 10 and len(set(seen)) == len(seen)  # between any two dispatches
  assert service.progress == service.progress
  engine.compiling = True
  assert service.progress != service.progress
