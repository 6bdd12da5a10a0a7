"""Seeds as prompts, for environments that make an episode from a number: apart in the splits, the same for ever."""

from __future__ import annotations

import itertools

from sao_jax.data.prompts import check_split, split_of


def seeds_of(label: str, split: str, count: int) -> list[int]:
  """Returns the first seeds of a split: a tenth of all numbers is held out, by the hash of the label and the number.

  >>> seeds_of("dice", "train", 4), seeds_of("dice", "heldout", 2)
  ([0, 2, 3, 4], [1, 27])

  Args:
    label: the kind of episode.
    split: "train" or "heldout".
    count: how many.
  """
  wanted = check_split(split)
  chosen = (number for number in itertools.count() if split_of(f"{label} {number}") == wanted)
  return list(itertools.islice(chosen, count))
