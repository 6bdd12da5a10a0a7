"""Recorded experts stay aligned with their tokens, over turns, interruptions, parking and new contexts (L14)."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys.engine_toy import MOE, SMALL, Record, multi_turns, params_of, play, policy_apply, prompt
from toys.sampler_fakes import drain, generate, make, request

from sao_jax.episode import PromptKey, Status, Trajectory
from sao_jax.learner.packing import pack
from sao_jax.models.attention.grouped import packed_attend
from sao_jax.models.transformer import trunk
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import SessionReleasedError
from sao_jax.sampler.scheduler import Scheduler


@pytest.mark.parametrize("kv_after_publish", ["keep", "reprefill"])
def test_a_publish_leaves_earlier_rows_alone(kv_after_publish):
  """L14: a prompt of 3, two tokens of version 0, two of version 1: a row for each of the 6 tokens that were read.

  The fake engine's row is (index, token, version that read it first); of the 5 first rows none changes afterwards, also
  when all of their keys and values are computed anew under version 1.
  """
  _, scheduler = make(decode_steps=2, kv_after_publish=kv_after_publish, keep_experts=True)
  done = []
  scheduler.submit(request(tokens=(11, 12, 13), max_tokens=4), done.append)
  scheduler.tick()  # reads the prompt and starts two steps
  scheduler.publish(None, 1)
  drain(scheduler)
  ids = [11, 12, 13, *done[0].token_ids.tolist()]
  assert done[0].policy_versions.tolist() == [0, 0, 1, 1]
  rows = done[0].routed_experts[:, 0].tolist()
  assert rows == [[i, ids[i], version] for i, version in enumerate([0, 0, 0, 0, 1, 1])]


TURN = st.tuples(st.lists(st.integers(1, 90), max_size=5), st.integers(1, 6))  # new tokens, tokens to sample


@hypothesis.given(
  sessions=st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=5),
  slots=st.integers(1, 3),
  publishes=st.sets(st.integers(0, 30), max_size=3),
  contexts=st.sets(st.tuples(st.integers(0, 4), st.integers(1, 3))),
  releases=st.sets(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=3),
  kv_after_publish=st.sampled_from(["keep", "reprefill"]),
)
def test_every_token_that_was_read_has_one_row(sessions, slots, publishes, contexts, releases, kv_after_publish):
  """Whatever is parked, published, released or begun anew: rows are those of tokens 0 ... n - 2 of every context."""
  _, scheduler = make(slots, decode_steps=3, kv_after_publish=kv_after_publish, keep_experts=True, park_after=0)
  ids, rows, waiting = {}, {}, []

  def start(index, turn):
    new, max_tokens = sessions[index][turn]
    fresh = turn == 0 or (index, turn) in contexts
    new = [1, *new] if fresh else new
    if fresh:
      ids[index], rows[index] = [], []
    ids[index] += new
    last = turn == len(sessions[index]) - 1
    asked = request(index, new, max_tokens, keep_slot=not last, new_context=fresh and turn > 0)
    scheduler.submit(asked, lambda done: waiting.append((index, turn, done)))

  for index in range(len(sessions)):
    start(index, 0)
  unfinished, tick = len(sessions), 0
  while unfinished:
    if tick in publishes:
      scheduler.publish(None, tick)
    for _, index in (release for release in releases if release[0] == tick):
      scheduler.release(index)
    scheduler.tick()
    tick += 1
    for index, turn, done in list(waiting):
      waiting.remove((index, turn, done))
      if isinstance(done, SessionReleasedError):
        unfinished -= 1
        continue
      ids[index] += done.token_ids.tolist()
      rows[index] += done.routed_experts[:, 0].tolist()
      assert [row[:2] for row in rows[index]] == [[i, token] for i, token in enumerate(ids[index][:-1])]
      versions = [row[2] for row in rows[index]]
      assert versions == sorted(versions) and set(versions) <= {0, *publishes}
      if turn + 1 < len(sessions[index]):
        start(index, turn + 1)
      else:
        unfinished -= 1


def test_without_recording_there_is_nothing():
  _, scheduler = make()
  assert generate(scheduler, request()).routed_experts is None


def of_record(record):
  """What the rollout side makes of a session that recorded its experts."""
  mask = np.array(record.mask)
  experts = np.concatenate([*record.experts, np.full((1, *record.experts[0].shape[1:]), -1, np.int16)])
  return Trajectory(
    token_ids=np.array(record.ids, np.int32),
    action_mask=mask,
    behavior_logprobs=np.array(record.logprobs, np.float32),
    policy_version=np.array(record.versions, np.int32),
    turn_starts=np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1).astype(np.int32),
    reward=1.0,
    status=Status.TERMINATED,
    key=PromptKey("toy", record.rollout_id, 0),
    rollout_id=record.rollout_id,
    routed_experts=experts,
  )


@pytest.fixture(scope="module")
def batch():
  """Five sessions of four turns on four slots, in packed rows; their first and last tokens are other people's too."""
  engine = Engine(params_of(MOE), MOE, SMALL, seed=0, keep_experts=True)
  scheduler = Scheduler(engine, park_after=0)
  records = play(scheduler, multi_turns(5), delay=2)
  assert scheduler.stats()["parked"] > 0
  return pack([of_record(record) for record in records], (192,), (1,), routed_shape=(1, 2))


def test_the_engine_records_what_the_learner_chooses(batch):
  """The same experts for every token of packed rows, under the same weights."""
  recorded = batch.routed_experts
  attend = packed_attend(jnp.asarray(batch.segment_ids))
  choose = jax.jit(lambda params: trunk(params, MOE, batch.token_ids, batch.positions, attend=attend)[2].experts)
  chosen = np.moveaxis(choose(params_of(MOE)), 0, 2)
  known = recorded[..., 0, 0] >= 0
  assert known.sum() == (batch.trajectory_ids > 0).sum() - 5  # all but the last token of each
  np.testing.assert_array_equal(np.sort(recorded[known], -1), np.sort(chosen[known], -1))
  assert len(np.unique(recorded[known])) == MOE.num_experts


def test_replay_brings_back_the_samplers_logprobs(batch):
  """A router that has changed since, and nothing else, would be a lag of its own; replay leaves its weights alone."""
  params = params_of(MOE)
  moe = params["moe_layers"]["moe"]
  # Experts in another order of preference: the logits of the router with their signs changed.
  turned = params | {"moe_layers": params["moe_layers"] | {"moe": moe | {"router": -moe["router"]}}}
  model = dataclasses.replace(MOE, num_experts_per_token=1)  # one expert, of weight 1 whatever its logit
  engine = Engine(params, model, SMALL, seed=0, keep_experts=True)
  records = play(Scheduler(engine), [multi_turns(1)[0], *multi_turns(3)[1:]])
  rows = pack([of_record(record) for record in records], (128,), (1,), routed_shape=(1, 1))
  mask = rows.action_mask
  replayed = np.asarray(policy_apply(model)(turned, rows).logprobs)[mask]
  np.testing.assert_allclose(replayed, rows.behavior_logprobs[mask], atol=1e-4)
  own = np.asarray(policy_apply(model)(turned, rows.replace(routed_experts=None)).logprobs)[mask]
  assert np.abs(own - rows.behavior_logprobs[mask]).max() > 0.1


def test_prompts_cut_into_pieces():
  """A prompt longer than the largest prefill bucket, 8, is read by several calls, between those of others."""
  engine = Engine(params_of(MOE), MOE, SMALL, seed=0, keep_experts=True)
  record = play(Scheduler(engine), [Record([(prompt(21, 0), 3)], 0), Record([(prompt(4, 1), 9)], 1)])[0]
  alone = play(Scheduler(engine), [Record([(tuple(record.ids[:-1]), 1)], 2)])[0]
  np.testing.assert_array_equal(np.concatenate(record.experts), np.concatenate(alone.experts))
