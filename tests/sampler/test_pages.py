"""A cache in pages samples what one in slots samples, token by token, and is never copied."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import latent_toy
from toys.engine_toy import (
  DENSE,
  MOE,
  REPREFILL,
  SMALL,
  Record,
  multi_turns,
  params_of,
  play,
  prompt,
  single_turns,
)

from sao_jax.config import MeshConfig
from sao_jax.errors import ConfigError
from sao_jax.models.transformer import param_specs
from sao_jax.parallel.layout import SAMPLER_RULES, Layout
from sao_jax.parallel.mesh import make_mesh
from sao_jax.sampler import kv_pages, latent_pages, page_steps
from sao_jax.sampler.cache_layout import choose_dtype, choose_layout, make_programs
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.page_call import PagedCall, prompt_arrays, take_pieces
from sao_jax.sampler.prefill import Extension, whole
from sao_jax.sampler.scheduler import Scheduler

# Pages that divide neither the context nor a chunk; prompts of up to 24 tokens are cut, and short ones share a chunk.
PAGES = dataclasses.replace(SMALL, cache_layout="pages", page_size=5, prefill_chunk=8)
WHOLE = dataclasses.replace(PAGES, prefill_chunk=64)  # all prompts are read at once


def paged(model, config=PAGES, keep_experts=False, **kwargs):
  return Scheduler(Engine(params_of(model), model, config, seed=0, keep_experts=keep_experts), **kwargs)


def in_slots(model, config=SMALL, keep_experts=False, **kwargs):
  return Scheduler(Engine(params_of(model), model, config, seed=0, keep_experts=keep_experts), **kwargs)


def assert_same(one, other):
  for expected, record in zip(one, other, strict=True):
    assert record.ids == expected.ids and record.versions == expected.versions
    np.testing.assert_allclose(record.logprobs, expected.logprobs, atol=1e-5)
    for a, b in zip(expected.experts, record.experts, strict=True):
      np.testing.assert_array_equal(a, b)


LATENT = dataclasses.replace(
  latent_toy.CONFIG, vocab_size=61, num_layers=3, indexer_types=("full", "shared", "full"), index_topk=6, num_experts=4,
  d_ff_expert=16, num_dense_layers=1, initializer_range=0.3, yarn=latent_toy.YARN,
)  # fmt: skip


@pytest.mark.parametrize("model", [MOE, LATENT], ids=["grouped", "latent"])
def test_turns_parking_and_experts_are_those_of_slots(model, monkeypatch):
  """Prompts in chunks, several turns, five sessions on four slots, and the experts of every token.

  Pages are wider than what they hold, as on a TPU, whose lanes they fill.
  """
  for module in (kv_pages, latent_pages):
    monkeypatch.setattr(module, "page_width", lambda width, layout: width + 3)
  expected, scheduler = (start(model, keep_experts=True, park_after=0) for start in (in_slots, paged))
  for records, delay in ((single_turns, 0), (multi_turns, 2)):
    assert_same(play(expected, records(), delay=delay), play(scheduler, records(), delay=delay))
  assert scheduler.stats()["parked"] > 0 and scheduler.stats()["preempted"] == 0


@pytest.mark.parametrize("kept", ["keep", "reprefill"])
def test_a_publish_in_the_middle_is_that_of_slots(kept):
  def run(scheduler):
    publish = lambda tick: scheduler.publish(params_of(DENSE, seed=9), 1) if tick == 0 else None
    return play(scheduler, [Record([(prompt(5 + i, i), 12), (prompt(3, i), 4)], i) for i in range(4)], publish)

  config = dataclasses.replace(WHOLE, kv_after_publish=kept)
  slots = REPREFILL if kept == "reprefill" else SMALL
  assert_same(run(in_slots(DENSE, slots)), run(paged(DENSE, config)))


def test_stop_ids_temperatures_tiny_chunks_and_few_pages():
  """Twelve pages for four slots of ten: some turns give way, and nobody sees it."""
  records = lambda: [
    Record([(prompt(3 + i, i), 30), (prompt(2, i), 5)], i, temperature=0.4 * i, stop_ids=(7, 60)) for i in range(6)
  ]
  expected, scheduler = in_slots(DENSE), paged(DENSE, dataclasses.replace(PAGES, num_pages=12, prefill_chunk=3))
  assert_same(play(expected, records()), play(scheduler, records()))
  assert scheduler.stats()["preempted"] > 0
  assert scheduler._engine.num_free_pages(0) == 12


def test_latents_are_all_read_where_none_are_chosen():
  everything = dataclasses.replace(LATENT, index_topk=0, num_layers=1, indexer_types=())
  assert_same(play(in_slots(everything), multi_turns(3)), play(paged(everything), multi_turns(3)))


def test_a_sequence_that_is_not_finite_leaves_its_pages_sound():
  scheduler = paged(DENSE, WHOLE)  # pages that were given back last are taken first
  expected = play(in_slots(DENSE), single_turns(2))
  broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params_of(DENSE))
  scheduler.publish(broken, 1)
  play(scheduler, single_turns(2))
  scheduler.publish(params_of(DENSE), 0)
  assert_same(expected, play(scheduler, single_turns(2)))


def test_the_flag_of_the_device_trips_and_no_other_page_is_written():
  engine = Engine(params_of(DENSE), DENSE, WHOLE, seed=0)
  long, short = (
    whole(Extension(slot, 0, prompt(length, slot), rollout_id=slot, budget=budget))
    for slot, length, budget in ((2, 46, 2), (1, 9, 0))
  )
  engine.decode(1, {2: 45}, pieces=engine.take_pieces([long, short]))
  slots = engine._state.slots
  engine._state = engine._state.replace(slots=slots.replace(budget=slots.budget.at[2].set(10)))  # a lying host
  before = np.asarray(engine._state.cache.kv)
  _, _, emitted, overflow, _ = engine.decode(4, {2: 46}).fetch()
  assert emitted[:, 2].tolist() == [True, False, False, False]
  assert overflow.tolist() == [False, False, True, False]
  changed = np.argwhere(np.any(before != np.asarray(engine._state.cache.kv), axis=(2, 3)))
  own = int(engine._programs._pool.table[2, 45 // 5])  # positions 46 and 47, of both layers
  assert changed.tolist() == [[own + layer * 40, offset] for layer in range(2) for offset in (1, 2)]


TWO_LAYERS = dataclasses.replace(LATENT, num_layers=2, indexer_types=("full", "shared"))


@pytest.mark.parametrize("model", [MOE, TWO_LAYERS], ids=["grouped", "latent"])
def test_a_mesh_has_a_pool_for_each_part_of_its_slots(model):
  model = dataclasses.replace(model, vocab_size=64)
  config = dataclasses.replace(PAGES, num_slots=4, num_pages=2 * 20)
  mesh = make_mesh(MeshConfig(data=1, fsdp=1, expert=2, tensor=2), jax.devices()[:4])
  sharded = jax.device_put(params_of(model), Layout(mesh, SAMPLER_RULES).param_shardings(param_specs(model)))
  engine = Engine(sharded, model, config, seed=0, mesh=mesh)
  first = jax.tree.leaves(engine._state.cache)[0]
  own = (2 * 20, 5, 2, 8) if model.kv_lora_rank == 0 else (2 * 20, 5, 16)  # layers · pages, one of two key heads
  assert first.sharding.shard_shape(first.shape) == own
  expected = play(in_slots(model), multi_turns(6))
  for one, other in zip(expected, play(Scheduler(engine), multi_turns(6)), strict=True):
    assert one.ids == other.ids
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
  after = jax.tree.leaves(engine._state.cache)[0]
  assert after.sharding.is_equivalent_to(first.sharding, after.ndim)


def test_one_program_with_prompts_and_one_without_serve_everything_and_write_in_place():
  engine = Engine(params_of(DENSE), DENSE, WHOLE, seed=0)
  before = page_steps.dispatch._cache_size()
  engine.warm_up()
  compiled = page_steps.dispatch._cache_size()
  assert compiled <= before + 2
  play(Scheduler(engine), single_turns(3) + multi_turns(3))
  assert page_steps.dispatch._cache_size() == compiled
  kv, shape = engine._state.cache.kv, "f32[" + ",".join(map(str, engine._state.cache.kv.shape)) + "]"
  for call in engine._programs.idle_calls(prefixes=True):
    program = page_steps.dispatch.lower(
      engine.params, engine._state, call.table, jax.random.key(0), call.chosen, np.int32(4), call.prompts,
      config=DENSE, rule=engine._programs.sizes.rule, max_steps=4, capacity=48, layout=engine._programs.sizes.layout,
    ).compile()  # fmt: skip
    assert not [line for line in program.as_text().splitlines() if "copy(" in line and f"= {shape}" in line]
    assert program.memory_analysis().alias_size_in_bytes >= kv.nbytes


def test_calls_hold_all_tokens_in_order_and_no_more_than_they_may():
  sizes = {5: 1, 0: 19, 1: 1, 2: 3, 3: 9}  # slots 0-3 and 4-7 have pools of their own
  waiting = {slot: whole(Extension(slot, 0, list(range(size)), slot, budget=1)) for slot, size in sizes.items()}
  written, calls = {slot: [] for slot in sizes}, 0
  while waiting:
    pieces = take_pieces(list(waiting.values()), slots_per_pool=4, chunk=8)
    for piece in pieces:
      _, waiting[piece.extension.slot] = waiting[piece.extension.slot].split(piece.count)
    waiting = {slot: rest for slot, rest in waiting.items() if rest is not None}
    pieces = tuple(sorted(pieces, key=lambda piece: piece.extension.slot))
    prompts = prompt_arrays(pieces, num_slots=8, num_pools=2, chunk=8)
    assert prompts.counts.reshape(2, 4).sum(axis=1).max() <= 8
    call = PagedCall(prompts.given, np.zeros((8, 3), np.int32), pieces, prompts)

    # The tokens of a pool's first step: of each slot those of its prompt, then the pending one.
    step = np.full((2, 8 + 4), -1)
    for piece, pool, tokens in call.written():
      assert pool == piece.extension.slot // 4 and piece.start == len(written[piece.extension.slot])
      assert (step[pool, tokens] == -1).all()
      step[pool, tokens] = piece.token_ids
      written[piece.extension.slot] += piece.token_ids
    for slot in np.flatnonzero(prompts.fields.active):
      assert len(written[slot]) == sizes[slot] - 1
    calls += 1
  assert written == {slot: list(range(size - 1)) for slot, size in sizes.items()} and calls == 4


def test_pages_that_hold_no_context_are_refused():
  with pytest.raises(ConfigError, match="num_pages.*\n.*at least 10"):
    Engine(params_of(DENSE), DENSE, dataclasses.replace(PAGES, num_pages=9), seed=0)


def test_pages_that_do_not_split_over_a_mesh_are_refused():
  layout = Layout(make_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4]), SAMPLER_RULES)
  with pytest.raises(ConfigError, match="num_pages: 43 pages.*4 devices.*\n.*multiple of 4"):
    make_programs(DENSE, dataclasses.replace(PAGES, num_pages=43), layout)


def test_the_platform_chooses_layout_and_dtype():
  auto = dataclasses.replace(SMALL, cache_layout="auto", cache_dtype="auto")
  assert [choose_layout(auto, platform) for platform in ("tpu", "cpu")] == ["pages", "slots"]
  assert [choose_dtype(auto, platform) for platform in ("tpu", "cpu")] == ["bfloat16", "float32"]
  fixed = dataclasses.replace(SMALL, cache_layout="slots", cache_dtype="float32")
  assert (choose_layout(fixed, "tpu"), choose_dtype(fixed, "tpu")) == ("slots", "float32")
