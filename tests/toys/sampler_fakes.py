"""A fake engine: the slots of the real one, with a hash of everything a slot holds in place of a model; a driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from sao_jax.config import SamplerConfig
from sao_jax.sampler.page_call import take_pieces
from sao_jax.sampler.page_pool import PagePool
from sao_jax.sampler.prefill import Extension, Piece, whole
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.sampler.scheduler import Scheduler

VOCAB = 97


def next_token(prefix: Sequence[int], rollout_id: int, version: int) -> int:
  """Depends on every token of the prefix and its order, so that a wrong cache gives wrong tokens."""
  value = rollout_id * 31 + version * 7
  for token in prefix:
    value = (value * 33 + token + 1) % 1_000_003
  return value % VOCAB


def answer(
  prefix: Sequence[int], rollout_id: int, count: int, version: int = 0, stop_ids: Sequence[int] = ()
) -> list[int]:
  """The tokens that an engine at one version samples behind `prefix`."""
  tokens: list[int] = []
  while len(tokens) < count and not (tokens and tokens[-1] in stop_ids):
    tokens.append(next_token([*prefix, *tokens], rollout_id, version))
  return tokens


@dataclasses.dataclass
class FakeSlot:
  held: list[int] = dataclasses.field(default_factory=list)  # written tokens
  pending: int = 0
  rollout_id: int = 0
  budget: int = 0
  stop_ids: tuple[int, ...] = ()
  active: bool = False


@dataclasses.dataclass(frozen=True)
class FakeDispatch:
  slots: np.ndarray
  version: int
  arrays: tuple[np.ndarray, ...]
  prefill: FakePrefill | None = None

  def fetch(self):
    return self.arrays


@dataclasses.dataclass(frozen=True)
class FakePrefill:
  rows: list[tuple[int, int, np.ndarray]]

  def fetch(self):
    return self.rows


class FakeEngine:
  """Same interface as `Engine`. A test may set `broken`: the exception that the next decode raises.

  With `reads_prompts` it is one whose dispatches read prompts in pieces.

  The "experts" of a token, where they are recorded, are its index, itself and the version that read it.
  """

  def __init__(self, config: SamplerConfig, version: int = 0, keep_experts: bool = False, reads_prompts: bool = False):
    self.config, self.version, self.vocab_size = config, version, 1000
    self.slots = [FakeSlot() for _ in range(config.num_slots)]
    self.broken: BaseException | None = None
    self.compiling = False
    self.log: list[tuple] = []
    self.decode_batch = config.num_slots if reads_prompts else config.decode_batch
    self.reads_prompts = reads_prompts
    self.routed_shape = (1, 3) if keep_experts else None
    self.pool = None
    if config.num_pages:
      pages = -(-config.context_length // config.page_size)
      self.pool = PagePool(config.num_slots, pages, config.num_pages, config.page_size)
      self.reserved = [0] * config.num_slots

  def reserve(self, slot: int, length: int) -> bool:
    if self.pool is None:
      return True
    assert length <= self.config.context_length
    enough = self.pool.reserve(slot, length)
    self.reserved[slot] = max(self.reserved[slot], length if enough else 0)
    return enough

  def release(self, slot: int) -> None:
    if self.pool is not None:
      self.pool.release(slot)
      self.reserved[slot] = 0

  def share_room(self, slot: int, other: int) -> bool:
    return self.pool is not None

  def num_free_pages(self, slot: int) -> int:
    return 0 if self.pool is None else self.pool.num_free(slot)

  def check_reserved(self, slot: int, length: int) -> None:
    assert self.pool is None or length <= self.reserved[slot], "nobody has reserved the pages"

  def extend(self, extensions: Sequence[Extension], weights=None) -> list[FakePrefill]:
    assert not self.reads_prompts
    prefills = self.write([whole(extension) for extension in extensions], self.version)
    return prefills if self.routed_shape else []

  def take_pieces(self, waiting: Sequence[Piece]) -> list[Piece]:
    return take_pieces(waiting, self.config.num_slots, self.config.prefill_chunk) if self.reads_prompts else []

  def write(self, pieces: Sequence[Piece], version: int) -> list[FakePrefill]:
    assert len({piece.extension.slot for piece in pieces}) == len(pieces)
    prefills = []
    for piece in pieces:
      e, start = piece.extension, piece.start
      e.check(self.config.context_length)
      self.check_reserved(e.slot, start + piece.count)
      slot = self.slots[e.slot]
      assert start <= len(slot.held), "a gap in the cache"
      slot.held = slot.held[:start] + list(piece.token_ids)
      slot.pending, slot.rollout_id, slot.budget = e.token_ids[-1], e.rollout_id, e.budget
      slot.stop_ids, slot.active = e.stop_ids, piece.last and e.budget > 0
      self.log.append(("extend", e.slot, start, piece.count + 1, e.rollout_id))
      rows = [[(index, token, version)] for index, token in enumerate(slot.held[start:], start)]
      prefills.append(FakePrefill([(e.slot, start, np.array(rows, np.int16).reshape(-1, 1, 3))]))
    return prefills

  def decode(self, num_steps: int, lengths: Mapping[int, int], weights=None, pieces=()) -> FakeDispatch:
    if self.broken is not None:
      raise self.broken
    assert 1 <= num_steps <= self.config.decode_steps and len(lengths) <= self.decode_batch
    assert lengths or pieces, "a dispatch without work"
    version = self.version if weights is None else weights.version
    read = [row for prefill in self.write(pieces, version) for row in prefill.fetch()]
    shape = (self.config.decode_steps, len(lengths))
    tokens, emitted = np.zeros(shape, np.int32), np.zeros(shape, bool)
    experts = np.full((*shape, 1, 3), -1, np.int16)
    for row, (index, bound) in enumerate(lengths.items()):
      slot = self.slots[index]
      assert not slot.active or len(slot.held) <= bound, "the attended window is too short"
      self.check_reserved(index, len(slot.held) + min(num_steps, slot.budget) * slot.active)
      for step in range(num_steps):
        if slot.active:
          experts[step, row] = len(slot.held), slot.pending, version
          slot.held.append(slot.pending)
          slot.pending = next_token(slot.held, slot.rollout_id, version)
          tokens[step, row], emitted[step, row] = slot.pending, True
          slot.budget -= 1
          slot.active = slot.budget > 0 and slot.pending not in slot.stop_ids
    self.log.append(("decode", num_steps, tuple(lengths), version))
    logprobs = np.where(emitted, -tokens / VOCAB, 0).astype(np.float32)
    arrays = (tokens, logprobs, emitted, np.zeros(shape[1], bool), experts if self.routed_shape else None)
    prefill = FakePrefill(read) if self.routed_shape and pieces else None
    return FakeDispatch(np.array(list(lengths), np.int32), version, arrays, prefill)

  def check_params(self, params) -> None:
    del params

  def publish(self, params, version: int) -> None:
    del params
    self.version = version
    self.log.append(("publish", version))


def make(
  num_slots=2,
  context_length=64,
  decode_steps=4,
  decode_batch=16,
  kv_after_publish="keep",
  keep_experts=False,
  num_pages=0,
  page_size=4,
  prefill_chunk=0,
  **kwargs,
):
  config = SamplerConfig(
    num_slots=num_slots,
    context_length=context_length,
    decode_steps=decode_steps,
    decode_batch=decode_batch,
    kv_after_publish=kv_after_publish,
    num_pages=num_pages,
    page_size=page_size,
    prefill_chunk=prefill_chunk or 1,
  )
  engine = FakeEngine(config, keep_experts=keep_experts, reads_prompts=prefill_chunk > 0)
  return engine, Scheduler(engine, **kwargs)


def request(session=0, tokens=(1, 2, 3), max_tokens=5, rollout=None, **kwargs):
  rollout = session if rollout is None else rollout
  return GenerateRequest(session, rollout, tuple(tokens), max_tokens, **kwargs)


def drain(scheduler, limit=1000):
  for _ in range(limit):
    if not scheduler.tick():
      return
  raise AssertionError("the scheduler never came to rest")


def generate(scheduler, req):
  results = []
  scheduler.submit(req, results.append)
  drain(scheduler)
  assert len(results) == 1
  if isinstance(results[0], BaseException):
    raise results[0]
  return results[0]
