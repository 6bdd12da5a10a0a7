"""The engine on real models: what it records equals what the learner computes, whatever the slots and the company."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys.engine_toy import (
  DENSE,
  MOE,
  REPREFILL,
  SMALL,
  TIED,
  Record,
  assert_agrees,
  multi_turns,
  params_of,
  play,
  prompt,
  scheduler_of,
  single_turns,
)

from sao_jax.config import SamplerConfig
from sao_jax.errors import ConfigError
from sao_jax.sampler import steps
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.fixed_weights import Weights
from sao_jax.sampler.prefill import Extension
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.sampler.scheduler import Scheduler


@pytest.mark.parametrize("model", [DENSE, MOE, TIED], ids=["dense", "moe", "tied"])
def test_logprobs_equal_the_learners(model):
  scheduler = scheduler_of(model, park_after=0)  # five sessions share four slots: some are parked
  for record in play(scheduler, single_turns()) + play(scheduler, multi_turns(), delay=2):
    assert_agrees(model, params_of(model), record)
    assert len(record.ids) == sum(len(new) + budget for new, budget in record.turns)
  assert scheduler.stats()["parked"] > 0
  assert scheduler.stats()["free_slots"] == 4


@pytest.mark.parametrize("layout", ["slots", "pages"])
def test_sessions_with_weights_of_their_own_stop_no_other(layout):
  """Their dispatches have all slots as rows, those of the others unused: these go on where they were."""
  scheduler = scheduler_of(TIED, dataclasses.replace(SMALL, cache_layout=layout, page_size=8))
  weights, done = Weights(params_of(TIED, seed=1), 7, jax.random.key(3)), {}
  for i in range(4):
    turn = GenerateRequest(i, i, prompt(4, i), 12, weights=weights if i % 2 else None)
    scheduler.submit(turn, functools.partial(done.__setitem__, i))
  for _ in range(40):
    scheduler.tick()
  assert [len(done[i].token_ids) for i in range(4)] == [12] * 4
  for i in range(4):
    record = Record([], i)
    record.append(prompt(4, i), False)
    record.append(done[i].token_ids, True, done[i].logprobs, done[i].policy_versions)
    assert_agrees(TIED, weights.params if i % 2 else params_of(TIED), record)


def test_temperature_and_stop_ids():  # L2, M2 on the device
  scheduler = scheduler_of(DENSE)
  free = play(scheduler, [Record([(prompt(5, 0), 12)], rollout_id=1, temperature=0.5)])[0]
  assert_agrees(DENSE, params_of(DENSE), free)
  sampled = free.ids[5:]
  stop = sampled[6]
  stopped = play(scheduler, [Record([(prompt(5, 0), 12)], 1, 0.5, stop_ids=(60, stop) if stop != 60 else (stop,))])[0]
  assert stopped.ids[5:] == sampled[: sampled.index(stop) + 1]
  greedy = play(scheduler, [Record([(prompt(5, 0), 6)], i, temperature=0.0) for i in (1, 2)])
  assert greedy[0].ids == greedy[1].ids  # another rollout, the same argmax


def test_tokens_do_not_depend_on_slot_or_company():  # A15
  alone = [play(scheduler_of(DENSE), [record])[0] for record in multi_turns(3)]
  crowd = multi_turns(8) + single_turns(5)
  scheduler = scheduler_of(DENSE, park_after=0)
  together = play(scheduler, crowd, delay=3)[:3]
  assert scheduler.stats()["parked"] > 0
  for lone, one in zip(alone, together, strict=True):
    assert lone.ids == one.ids
    np.testing.assert_allclose(np.array(lone.logprobs), np.array(one.logprobs), atol=1e-5)
  other_seed = Scheduler(Engine(params_of(DENSE), DENSE, SMALL, seed=1))
  assert play(other_seed, multi_turns(1))[0].ids != alone[0].ids


def test_rollouts_of_one_prompt_differ_and_one_rollout_is_itself_in_every_slot():  # A15
  same = lambda rollout_id: Record([(prompt(5, 0), 12), (prompt(2, 1), 6)], rollout_id)
  together = play(scheduler_of(DENSE), [same(7), same(8), same(9)])
  assert len({tuple(record.ids) for record in together}) == 3
  assert play(scheduler_of(DENSE), [same(9), same(7)])[1].ids == together[0].ids


def test_a_replayed_rollout_gives_the_same_tokens():  # A15
  scheduler = scheduler_of(DENSE)
  first = play(scheduler, single_turns(3))
  again = play(scheduler, list(reversed(single_turns(3))))
  assert [record.ids for record in first] == [record.ids for record in reversed(again)]


@pytest.mark.parametrize("config", [SMALL, REPREFILL], ids=["keep", "reprefill"])
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_publish_in_the_middle(model, config):  # L12, L15
  scheduler = scheduler_of(model, config)
  publish = lambda tick: scheduler.publish(params_of(model, seed=9), 1) if tick == 0 else None
  records = play(scheduler, [Record([(prompt(5 + i, i), 12), (prompt(3, i), 4)], i) for i in range(4)], publish)
  for record in records:
    versions = np.array(record.versions)
    assert set(versions[record.mask].tolist()) == {0, 1}
    assert_agrees(model, params_of(model), record, where=versions == 0)
    if config.kv_after_publish == "reprefill":
      assert_agrees(model, params_of(model, seed=9), record, where=versions == 1)
    else:
      with pytest.raises(AssertionError):  # old keys and values under new weights: that is what "keep" means
        assert_agrees(model, params_of(model, seed=9), record, where=versions == 1)
  fresh = play(scheduler, [Record([(prompt(4, 77), 16)], rollout_id=77)])[0]
  assert_agrees(model, params_of(model, seed=9), fresh)


def test_publish_reaches_the_sampler_and_tied_heads():  # L15, L16
  engine = Engine(params_of(TIED), TIED, SMALL, seed=0)
  changed = jax.tree.map(lambda x: x * 0.5, params_of(TIED))
  changed["embed"] = changed["embed"].at[0].set(1.0)
  engine.publish(changed, 3)
  assert engine.version == 3
  checksum = lambda tree: sum(float(np.asarray(leaf, np.float64).sum()) for leaf in jax.tree.leaves(tree))
  assert checksum(engine.params) == checksum(changed) != checksum(params_of(TIED))
  probe = play(Scheduler(engine), [Record([(prompt(8, 5), 40)], rollout_id=0)])[0]
  assert_agrees(TIED, changed, probe)
  assert np.array(probe.versions)[probe.mask].tolist() == [3] * 40


def test_parameters_of_another_model_are_refused():
  engine = Engine(params_of(DENSE), DENSE, SMALL, seed=0)
  with pytest.raises(ConfigError, match="moe_layers|dense_layers"):
    engine.publish(params_of(MOE), 1)
  with pytest.raises(ConfigError, match="bfloat16"):
    engine.check_params(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(DENSE)))
  assert engine.version == 0


def test_the_host_refuses_what_does_not_fit():  # L10
  engine = Engine(params_of(DENSE), DENSE, SMALL, seed=0)
  for length, budget in ((49, 0), (40, 9), (1, 48)):
    with pytest.raises(ConfigError, match="48"):
      engine.extend([Extension(0, 0, [1] * length, rollout_id=0, budget=budget)])
  engine.extend([Extension(0, 0, [1] * 40, rollout_id=0, budget=8)])
  with pytest.raises(ConfigError, match="stop_ids"):
    engine.extend([Extension(0, 0, [1], rollout_id=0, budget=1, stop_ids=tuple(range(9)))])


def test_the_flag_of_the_device_trips_and_nothing_is_overwritten():  # L10
  engine = Engine(params_of(DENSE), DENSE, SMALL, seed=0)
  engine.extend([Extension(2, 0, prompt(46, 0), rollout_id=0, budget=2)])
  slots = engine._state.slots
  engine._state = engine._state.replace(slots=slots.replace(budget=slots.budget.at[2].set(10)))  # a lying host
  before = np.asarray(engine._state.cache.k)
  tokens, _, emitted, overflow, _ = engine.decode(4, {2: 45}).fetch()
  assert emitted[:, 2].tolist() == [True, True, False, False]
  assert overflow.tolist() == [False, False, True, False]
  after = np.asarray(engine._state.cache.k)
  np.testing.assert_array_equal(before[2, ..., :45], after[2, ..., :45])
  np.testing.assert_array_equal(before[[0, 1, 3]], after[[0, 1, 3]])
  assert np.all(np.any(after[2, ..., 45:47] != 0, axis=-2)) and np.all(after[2, ..., 47] == 0)


def test_cache_dtype_is_the_only_difference():  # L11
  config = dataclasses.replace(SMALL, cache_dtype="bfloat16")
  engine = Engine(params_of(DENSE), DENSE, config, seed=0)
  engine.warm_up()
  compiled = steps.decode._cache_size(), steps.extend._cache_size()
  record = play(Scheduler(engine), multi_turns(1))[0]
  # What is written is cast: the cache stays as it is, and nothing is traced again.
  assert (steps.decode._cache_size(), steps.extend._cache_size()) == compiled
  assert {leaf.dtype for leaf in jax.tree.leaves(engine._state.cache)} == {jnp.dtype(jnp.bfloat16)}
  assert_agrees(DENSE, params_of(DENSE), record, tolerance=0.05)
  with pytest.raises(AssertionError):
    assert_agrees(DENSE, params_of(DENSE), record, tolerance=1e-5)


BUCKETS = SamplerConfig(
  num_slots=32,
  context_length=40,
  decode_steps=3,
  decode_batch=16,
  prefill_buckets=(4, 16),
  prefill_batch=4,
  window_buckets=(16,),
)


def test_buckets_compile_once_and_change_nothing():
  """Few rows, many rows, short and long windows, batched prefills: the same tokens; nothing compiles after warm-up."""
  engine = Engine(params_of(TIED), TIED, BUCKETS, seed=0)
  engine.warm_up()
  compiled = steps.decode._cache_size(), steps.extend._cache_size()
  records = [
    Record([(prompt(1 + i % 19, i), 1 + i % 11), (prompt(2, i), 3)], rollout_id=i, temperature=0.5 + 0.1 * i)
    for i in range(40)
  ]
  play(Scheduler(engine), records)
  assert (steps.decode._cache_size(), steps.extend._cache_size()) == compiled
  engine.publish(jax.tree.map(jnp.copy, params_of(TIED)), 1)
  again = [dataclasses.replace(r, ids=[], mask=[], logprobs=[], versions=[]) for r in reversed(records[10:13])]
  play(Scheduler(engine), again)
  assert (steps.decode._cache_size(), steps.extend._cache_size()) == compiled
  for record, one in zip(reversed(records[10:13]), again, strict=True):
    assert record.ids == one.ids
    np.testing.assert_allclose(record.logprobs, one.logprobs, atol=1e-5)
  assert records[5].temperature == 1.0
  assert_agrees(TIED, params_of(TIED), records[5])


def test_the_engine_says_when_a_program_is_called_for_the_first_time(monkeypatch):
  seen = []
  extend = steps.extend
  engine = scheduler_of(DENSE)._engine
  monkeypatch.setattr(steps, "extend", lambda *args, **kwargs: seen.append(engine.compiling) or extend(*args, **kwargs))
  for _ in range(2):
    engine.extend([Extension(0, 0, prompt(5, 0), rollout_id=0, budget=0)])
  assert seen == [True, False] and not engine.compiling


def test_the_cache_is_updated_in_place():
  """No program may copy the whole cache: it is donated, aliased, and written by slices."""
  engine = Engine(params_of(TIED), TIED, SMALL, seed=0)
  shape = "f32[" + ",".join(map(str, engine._state.cache.k.shape)) + "]"
  compiled = steps.decode.lower(
    engine.params, engine._state, jax.random.key(0), np.arange(4, dtype=np.int32), np.int32(4),
    config=TIED, rule=engine._programs.sizes.rule, window=48, max_steps=4, layout=engine._programs.sizes.layout,
  ).compile()  # fmt: skip
  copies = [line for line in compiled.as_text().splitlines() if "copy(" in line and f"= {shape}" in line]
  assert not copies, copies
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= 2 * engine._state.cache.k.nbytes
