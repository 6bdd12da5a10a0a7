"""Tiny random checkpoints saved by transformers, and the same model in both implementations, for the parity tests."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import ModelConfig, SamplerConfig
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.models.attention import attention_kind
from sao_jax.models.logprobs import token_logprobs
from sao_jax.models.transformer import head_logits, trunk
from sao_jax.parallel.layout import ONE_DEVICE
from sao_jax.sampler.engine import Engine
from sao_jax.sampler.requests import GenerateRequest
from sao_jax.sampler.scheduler import Scheduler

REASON = "the extra `parity` is not installed (launch/test.sh --parity)"
SHAPE = (2, 80)  # rows and tokens of every batch here: one compilation
VOCAB, PROMPT, NEW = 97, 9, 64


def transformers():
  """The transformers package, quiet and offline; skips the test where it or torch is missing."""
  os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
  pytest.importorskip("torch", reason=REASON).set_num_threads(1)  # tiny models; its threads would fight with jax's
  package = pytest.importorskip("transformers", reason=REASON)
  package.utils.logging.disable_progress_bar()
  return package


def save_random(config: Any, path: pathlib.Path, seed: int = 0) -> Any:
  """A model of this transformers config, every parameter and buffer random, saved as its users save it."""
  import torch

  torch.manual_seed(seed)
  model = transformers().AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
  with torch.no_grad():
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
      if "rotary" in name or not tensor.is_floating_point():
        continue
      centre, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.2)
      tensor.copy_(centre + scale * torch.randn_like(tensor))
  model.save_pretrained(path)
  return model


@dataclasses.dataclass
class Pair:
  """One checkpoint, loaded by both sides.

  Attributes:
    theirs: the transformers model.
    path: of the folder.
    config, params: ours.
    experts: what our routers chose at the last call of `forward`, one [B, T, k] per expert layer.
  """

  theirs: Any
  path: pathlib.Path
  config: ModelConfig
  params: Any
  experts: list[np.ndarray] = dataclasses.field(default_factory=list)

  def logits_of(self, ids: np.ndarray, theirs: Any = None) -> np.ndarray:
    """transformers' logits [T, V] of one sequence."""
    import torch

    with torch.no_grad():
      return (theirs or self.theirs)(torch.as_tensor(ids)[None].long()).logits[0].numpy()

  def forward(self, ids: np.ndarray, segment_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Our logits [B, T, V] and token log-probs [B, T] of packed rows."""
    positions = np.zeros(ids.shape, np.int32)
    for row, segments in enumerate(segment_ids):
      for segment in np.unique(segments[segments > 0]):
        inside = segments == segment
        positions[row, inside] = np.arange(inside.sum())
    logits, logprobs, experts = jax.device_get(_program(self.config, self.params, ids, positions, segment_ids))
    self.experts = [] if experts is None else list(experts)
    return logits, logprobs

  def generate(self, sessions: list[list[tuple[list[int], int]]], temperature: float) -> list[list[Any]]:
    """Our cached sampler's completions of the turns of each session, (new tokens, tokens to sample), side by side."""
    sampler = SamplerConfig(
      num_slots=2, context_length=SHAPE[1], decode_steps=16, decode_batch=2, prefill_buckets=(16,), prefill_batch=1,
      window_buckets=(SHAPE[1],),
    )  # fmt: skip
    scheduler = Scheduler(Engine(self.params, self.config, sampler, seed=0))
    done = [[] for _ in sessions]
    for turn in range(len(sessions[0])):
      for index, turns in enumerate(sessions):
        last = turn == len(turns) - 1
        request = GenerateRequest(index, index, *turns[turn], temperature=temperature, keep_slot=not last)
        scheduler.submit(request, done[index].append)
      while any(len(completions) <= turn for completions in done):
        scheduler.tick()
    return done


@functools.partial(jax.jit, static_argnums=0)  # families of one shape share the program
def _program(config, params, ids, positions, segment_ids):
  attend = attention_kind(config).packed(config, segment_ids, ONE_DEVICE)
  hidden, _, routed = trunk(params, config, ids, positions, attend=attend)
  logprobs, _ = token_logprobs(params, config, hidden, ids, segment_ids)
  return head_logits(params, config, hidden), logprobs, routed and routed.experts


def load_pair(config: Any, path: pathlib.Path) -> Pair:
  """Saves with transformers, loads with ours."""
  theirs = save_random(config, path)
  ours = HFFolder(path).model_config()
  return Pair(theirs, path, ours, import_policy(path, ours))


def random_ids(*shape: int, seed: int = 0) -> np.ndarray:
  """Token ids."""
  return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)


def padded_batch() -> tuple[np.ndarray, np.ndarray]:
  """One long and one short row, both ending in padding."""
  segments = np.zeros(SHAPE, np.int32)
  segments[0, :75], segments[1, :31] = 1, 1
  return random_ids(*SHAPE), segments


def packed_batch() -> tuple[np.ndarray, np.ndarray]:
  """Several segments in a row, one of a single token."""
  segments = np.zeros(SHAPE, np.int32)
  segments[0, :33], segments[0, 33:34], segments[0, 34:79] = 1, 2, 3
  segments[1, :50], segments[1, 50:] = 1, 2
  return random_ids(*SHAPE, seed=1), segments


def segments_of(ids: np.ndarray, segment_ids: np.ndarray):
  """Yields (row, slice) of every segment."""
  for row, segments in enumerate(segment_ids):
    for segment in np.unique(segments[segments > 0]):
      (where,) = np.nonzero(segments == segment)
      yield row, slice(where[0], where[-1] + 1)


def row_of(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """A batch of SHAPE that holds this sequence in its first row."""
  batch, segments = np.zeros(SHAPE, np.int32), np.zeros(SHAPE, np.int32)
  batch[0, : len(ids)], segments[0, : len(ids)] = ids, 1
  return batch, segments


def max_difference(a: Any, b: Any) -> float:
  """max |a - b|."""
  return float(jnp.max(jnp.abs(jnp.asarray(a, jnp.float32) - jnp.asarray(b, jnp.float32))))
