"""The gateway in front of the real sampler: the same tokens, new weights in flight, slots that come free."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import numpy as np
import openai
import pytest
from toys.engine_toy import DENSE, SMALL, params_of
from toys.gateway_toy import BYTES, client_of, connect, exchange, post, request_bytes, serving

from sao_jax.evaluation.served_sampler import ServedSampler
from sao_jax.gateway.sampler_backend import SamplerBackend
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.sampler.scheduler import Scheduler
from sao_jax.sampler.service import SamplerService

PROMPT, PATH = [1, 42, 3, 40], "/v1/completions"
FACTS = {"return_token_ids": True}


class Held(Scheduler):
  """Stands still once it has sampled `hold_after` tokens, until it may go on."""

  hold_after = 10**9

  def __init__(self, engine):
    super().__init__(engine)
    self.go, self.held = threading.Event(), threading.Event()

  def tick(self):
    if self.stats()["sampled_tokens"] >= self.hold_after:
      self.held.set()
      self.go.wait(60)
    return super().tick()

  def hold(self, tokens):
    self.go.clear(), self.held.clear()
    self.hold_after = self.stats()["sampled_tokens"] + tokens

  def release_all(self):
    self.hold_after = 10**9
    self.go.set()


@contextlib.contextmanager
def live():
  """(server, service, scheduler) on the tiny engine."""
  scheduler = Held(Engine(params_of(DENSE), DENSE, SMALL, seed=0))
  with SamplerService(scheduler) as service:
    sampler = ServedSampler(service, SMALL, DENSE.vocab_size)
    backend = SamplerBackend(sampler, BYTES, model="toy")
    with serving(backend, health=sampler.health) as server:
      yield server, service, scheduler


@pytest.fixture(scope="module")
def running():
  with live() as running:
    yield running


@pytest.fixture(scope="module")
def client(running):
  with client_of(running[0]) as client:
    yield client


def complete(client, **fields):
  return client.completions.create(model="toy", prompt=PROMPT, extra_body=FACTS, **fields)


def text_of(ids):
  return BYTES.decode(ids)


def test_tokens_are_those_of_the_sampler(running, client):
  _, service, _ = running
  answer = complete(client, seed=3, max_tokens=20, logprobs=0).choices[0]
  again = complete(client, seed=3, max_tokens=20).choices[0]
  assert answer.token_ids == again.token_ids != complete(client, seed=4, max_tokens=20).choices[0].token_ids
  assert answer.prompt_token_ids == PROMPT and set(answer.policy_versions) == {0}
  assert answer.text == text_of(answer.token_ids) and len(answer.logprobs.token_logprobs) == len(answer.token_ids)

  # Greedy tokens do not depend on the number of the rollout: the service gives the same ones.
  greedy = complete(client, temperature=0, max_tokens=9, logprobs=0).choices[0]
  request = GenerateRequest(service.new_session(), 0, PROMPT, 9, temperature=0.0)
  completion = service.generate_sync(request, timeout=60)
  assert greedy.token_ids == completion.token_ids.tolist()
  np.testing.assert_allclose(greedy.logprobs.token_logprobs, completion.logprobs)


def test_a_stream_has_the_tokens_of_the_whole_answer(client):
  whole = complete(client, seed=5, max_tokens=24).choices[0]
  *_, last = chunks = list(complete(client, seed=5, max_tokens=24, stream=True))
  assert last.choices[0].token_ids == whole.token_ids
  assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
  assert len(chunks) > 3, "it came at once"


def test_a_stop_text_ends_the_sampling(running, client):
  _, _, scheduler = running
  whole = complete(client, seed=6, max_tokens=40).choices[0]
  stop, before = whole.text[2:4], scheduler.stats()["sampled_tokens"]
  cut = complete(client, seed=6, max_tokens=40, stop=stop).choices[0]
  assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
  assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and text_of(cut.token_ids).endswith(stop)
  deadline = time.monotonic() + 20
  while scheduler.stats()["free_slots"] < SMALL.num_slots:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  assert scheduler.stats()["sampled_tokens"] >= before + len(cut.token_ids)


def test_a_context_that_is_full_ends_an_answer(client):
  answer = complete(client, seed=7, temperature=2)
  assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == SMALL.context_length
  with pytest.raises(openai.BadRequestError) as caught:
    client.completions.create(model="toy", prompt=[1] * SMALL.context_length)
  assert caught.value.code == "context_length_exceeded"


def test_requests_in_flight_survive_new_weights(running, client):
  _, service, scheduler = running
  scheduler.hold(tokens=8)
  answers = []
  ask = lambda: answers.append(complete(client, seed=8, max_tokens=40, temperature=2, stream=True))
  thread = threading.Thread(target=ask)
  thread.start()
  assert scheduler.held.wait(60)
  service.publish(params_of(DENSE, seed=1), version=1)
  scheduler.release_all()
  thread.join()
  *_, last = answers[0]
  versions = last.choices[0].policy_versions
  assert versions == sorted(versions) and set(versions) == {0, 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(running, client, stream):
  server, _, scheduler = running
  scheduler.hold(tokens=4)
  with connect(server) as connection:
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 40, "stream": stream, "temperature": 2}
    connection.sendall(request_bytes(PATH, json.dumps(body).encode()))
    assert scheduler.held.wait(60)
    assert scheduler.stats()["free_slots"] == SMALL.num_slots - 1
  deadline = time.monotonic() + 20
  while not scheduler._inbox:  # the release has come
    assert time.monotonic() < deadline, "nobody noticed"
    time.sleep(0.01)
  scheduler.release_all()
  while scheduler.stats()["free_slots"] < SMALL.num_slots:
    assert time.monotonic() < deadline, "the slot is held"
    time.sleep(0.01)
  assert complete(client, max_tokens=3).usage.completion_tokens == 3


def test_a_sampler_that_has_ended_is_told_of():
  with live() as (server, service, scheduler):
    scheduler.hold(tokens=4)
    answers = []
    body = {"model": "toy", "prompt": PROMPT, "temperature": 2, "max_tokens": 40}
    thread = threading.Thread(target=lambda: answers.append(post(server, PATH, body)))
    thread.start()
    assert scheduler.held.wait(60)
    service._end(RuntimeError("a fault"))
    scheduler.release_all()
    thread.join()
    for status, answer in (answers[0], post(server, PATH, body)):
      assert status == 503 and answer["error"]["code"] == "sampler_ended"
    assert exchange(server, request_bytes("/health", b"", method="GET"))[0] == 503
