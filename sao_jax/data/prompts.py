"""Prompt sources through grain: an order that depends on the seed alone, and iterators that resume exactly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sao_jax.data.mixed_prompts import InTurns, MixedPrompts, Turns
from sao_jax.episode import BadPrompt, Prompt
from sao_jax.errors import ConfigError

if TYPE_CHECKING:  # it imports jax, which takes a second: worker processes of environments do without
  import grain

HELDOUT_FRACTION = 0.1


def split_of(text: str) -> str:
  """Puts a tenth of all texts into "heldout", the others into "train", by the SHA-256 of the text alone.

  The splits are therefore disjoint for every seed and process, and a text that is drawn twice stays in its split.
  """
  number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
  return "heldout" if number < HELDOUT_FRACTION * 2**64 else "train"


def check_split(split: str) -> str:
  """Returns the split; raises ConfigError when it is neither "train" nor "heldout"."""
  if split not in ("train", "heldout"):
    raise ConfigError("split", f"There is no split {split!r}.", 'Use "train" or "heldout".')
  return split


class _Items(Sequence):
  """The items of a source; for one that is damaged, the error that says so, since a pipeline ends at an exception."""

  def __init__(self, source: Sequence[Prompt]):
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Prompt | BadPrompt:
    try:
      return self._source[index]
    except BadPrompt as problem:
      return problem


def check_prompts_of(source: Any) -> None:
  """Refuses what an environment may return by mistake for its prompts; looks at the first one.

  Raises:
    ConfigError: there is no random access to it, or it holds something else.
  """
  remedy = "Return a list of sao_jax.episode.Prompt(PromptKey(name, number, 0), {...}), or what behaves like one."
  if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
    kind = type(source).__name__
    raise ConfigError("environment", f"prompts() returned a {kind}, which has no length or no index.", remedy)
  first = _Items(source)[0] if len(source) else None
  if not (first is None or isinstance(first, Prompt | BadPrompt)):
    raise ConfigError("environment", f"prompts() holds a {type(first).__name__}, not a Prompt.", remedy)


class PromptIterator:
  """Prompts in the pipeline's order; `get_state` is JSON and restores the exact position.

  A `BadPrompt` that the source raises is raised here, too, and the next call goes on behind that item.
  """

  def __init__(self, dataset: grain.MapDataset, description: dict[str, Any]):
    """Begins at the first prompt.

    Args:
      dataset: the one order of all processes.
      description: names the order (length, seed, ...), for `set_state` to compare; "shard" is (index, count) of the
        process, which takes the positions index, index + count, ...
    """
    self._dataset, self._description = dataset, description
    self._begin(0, [])

  def __iter__(self) -> PromptIterator:
    return self

  def __next__(self) -> Prompt:
    item = self._dataset[self._left_over.pop(0)] if self._left_over else next(self._iterator)
    if isinstance(item, BadPrompt):
      raise item
    return item

  def get_state(self) -> dict[str, Any]:
    """Returns the position for `set_state`, in JSON types."""
    state = {"order": self._description, "position": self._iterator.get_state()}
    return state | ({"start": self._start, "left_over": list(self._left_over)} if self._start else {})

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to the position of a state: the next prompt is the one that was next when the state was taken.

    A state {"shares": [...]} has those of all processes of a run that was saved by another number of them. What none of
    them has taken is divided over those of now: first what the slower ones have left behind the fastest, in order.

    Raises:
      ConfigError: when the state belongs to another order of prompts.
    """
    shares = state.get("shares", [state])
    for share in shares:
      self._check(share, ignored=("shard",) if "shares" in state else ())
    if "shares" in state:
      start, left_over = _not_taken(shares)
      index, count = self._description["shard"]
      self._begin(start, left_over[index::count])
    else:
      self._begin(state.get("start", 0), state.get("left_over", []))
      self._iterator.set_state(state["position"])

  def _begin(self, start: int, left_over: Sequence[int]) -> None:
    """Goes to this process's first position from `start` on, behind the positions that are left over."""
    import grain

    index, count = self._description["shard"]
    self._start, self._left_over = start, list(left_over)
    # No worker threads: a source computes or reads one small prompt at a time, and a state names the next one exactly.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    self._iterator = iter(self._dataset[start + index :: count].to_iter_dataset(options))

  def _check(self, state: dict[str, Any], ignored: Sequence[str]) -> None:
    # Through JSON, so that a state that was stored as JSON and one that was not compare equal.
    saved, own = (json.loads(json.dumps(order)) for order in (state["order"], self._description))
    differ = [name for name in own if saved.get(name) != own[name] and name not in ignored]
    if differ or (not ignored and saved != own):
      changed = ", ".join(f"{name} {saved.get(name)!r} -> {own[name]!r}" for name in differ)
      raise ConfigError(
        "prompts",
        f"The saved position belongs to another order of prompts ({changed}).",
        "Resume with the same prompts and seed, or start in a new directory.",
      )


def _not_taken(shares: Sequence[dict[str, Any]]) -> tuple[int, list[int]]:
  """Returns the position from which on nobody has taken a prompt, and all before it that nobody has taken."""
  positions = []
  for share in shares:
    index, count = share["order"]["shard"]
    positions.append((share.get("start", 0) + index, count, share["position"]["next_index"]))

  # A process that has taken k prompts of its own has taken the last at first + (k - 1) * count.
  starts = [share.get("start", 0) for share in shares]
  start = max([first + (taken - 1) * count + 1 for first, count, taken in positions if taken], default=max(starts))
  left_over = [at for share in shares for at in share.get("left_over", ())]
  for first, count, taken in positions:
    left_over += range(first + taken * count, start, count)
  return start, sorted(left_over)


def make_prompt_iterator(
  source: Sequence[Prompt],
  *,
  seed: int,
  shuffle: bool = True,
  epochs: int | None = None,
  shard: tuple[int, int] = (0, 1),
) -> PromptIterator:
  """Iterates over the prompts of one host, with the epoch in their keys.

  Every epoch is a permutation of its own. Host i of n takes positions i, i + n, i + 2n, ... of the one endless global
  order, so the hosts together see every prompt exactly once per epoch, even if n does not divide the number of prompts.

  >>> from sao_jax.environments.calculator import Calculator
  >>> spec = Calculator(num_prompts=3)
  >>> source = spec.prompts(spec.tokenizer(), "train", seed=0)
  >>> iterator = make_prompt_iterator(source, seed=0, shuffle=False)
  >>> [(prompt.key.id, prompt.key.epoch) for prompt, _ in zip(iterator, range(4))]
  [(0, 0), (1, 0), (2, 0), (0, 1)]
  >>> resumed = make_prompt_iterator(source, seed=0, shuffle=False)
  >>> resumed.set_state(iterator.get_state())
  >>> next(resumed) == next(iterator)
  True

  Args:
    source: random access (`len`, `[index]`) to prompts of epoch 0; may raise BadPrompt for an item that is damaged.
      Sources of `MixedPrompts` take turns by their weights, each in epochs of its own.
    seed: seed of the shuffle.
    shuffle: False keeps the source's order.
    epochs: passes over the source; None: endless.
    shard: (index of this host, number of hosts).

  Raises:
    ConfigError: for an empty source, a shard that does not exist, or less than one epoch.
  """
  import grain

  check_prompts_of(source)
  index, count = shard
  if not 0 <= index < count:
    raise ConfigError("shard", f"There is no shard {index} of {count}.", "Use 0 <= index < count.")
  if not len(source):
    raise ConfigError("prompts", "The source of prompts is empty.", "Check the split and the data set's settings.")
  if epochs is not None and epochs < 1:
    raise ConfigError("epochs", f"{epochs} epochs hold no prompt.", "Use at least 1, or None for an endless iterator.")

  # The iterator cuts the order into shards last: all hosts agree on the global order.
  order = {"length": len(source), "seed": seed, "shuffle": shuffle, "epochs": epochs, "shard": [index, count]}
  if not isinstance(source, MixedPrompts):
    return PromptIterator(_passes(source, seed, shuffle, epochs), order)

  # Sources of a mixture go through epochs of their own, each as if it were alone.
  if epochs is not None:
    raise ConfigError("epochs", "A mixture has no passes: each of its sources does.", "Use None.")
  turns = Turns(source.weights, seed)
  passes = [_passes(each, turns.seed_of(number), shuffle, None) for number, each in enumerate(source.sources)]
  order |= {"length": [*map(len, source.sources)], "weights": [*source.weights]}
  return PromptIterator(grain.MapDataset.source(InTurns(passes, turns)), order)


def _passes(source: Sequence[Prompt], seed: int, shuffle: bool, epochs: int | None) -> grain.MapDataset:
  """Makes the order of one source. The key of a prompt holds its epoch, so it has another name in every pass."""
  import grain

  length = len(source)

  def with_epoch(position: int, prompt: Prompt | BadPrompt) -> Prompt | BadPrompt:
    if isinstance(prompt, BadPrompt):
      return prompt
    return dataclasses.replace(prompt, key=prompt.key._replace(epoch=position // length))

  dataset = grain.MapDataset.source(_Items(source)).seed(seed)
  if shuffle:
    dataset = dataset.shuffle()
  return dataset.repeat(epochs).map_with_index(with_epoch)
