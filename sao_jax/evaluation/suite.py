"""Published benchmarks: where their files come from, how often each problem is tried, and with how many turns."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sao_jax.configuration.config_tree import nearest
from sao_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Layout:
  """A form in which the problems were published.

  Attributes:
    files: pattern of the files, within the folder as it is downloaded.
    question: field with the problem.
    answer: field with the right answer.
  """

  files: str
  question: str = "problem"
  answer: str = "answer"


@dataclasses.dataclass(frozen=True)
class Suite:
  """One benchmark. All are sampled at temperature 1 with top-p 1.

  Attributes:
    name: as in `--suite`.
    title: for people.
    problems: how many were published.
    published: the address, and others with the same problems.
    layouts: the first one that is there is read.
    runs: episodes of each problem.
    max_turns: of an episode with tools.
    kind: questions with a mathematical answer, or repositories with a problem.
  """

  name: str
  title: str
  problems: int
  published: tuple[str, ...]
  layouts: tuple[Layout, ...]
  runs: int = 16
  max_turns: int = 50
  kind: Literal["questions", "repositories"] = "questions"


# Looked up, fields and names of files: the cards and file lists of these data sets on huggingface.co; for BeyondAIME
# its loader in NeMo-RL (nemo_rl/data/eval_datasets/beyond_aime.py), which reads split "test"; the README and the file
# itself in google-deepmind/superhuman, folder imobench, whose first version is deprecated.
SUITES = {
  suite.name: suite
  for suite in (
    Suite(
      "aime25",
      "AIME 2025",
      30,
      ("hf:math-ai/aime25", "hf:opencompass/AIME2025"),
      (Layout("test.jsonl"), Layout("aime2025-*.jsonl", "question"), Layout("data/test-*.parquet")),
    ),
    Suite(
      "beyondaime",
      "BeyondAIME",
      100,
      ("hf:ByteDance-Seed/BeyondAIME",),
      (Layout("data/test-*.parquet"), Layout("test*.parquet"), Layout("test.jsonl")),
      runs=4,
    ),
    Suite(
      "hmmt_nov_2025",
      "HMMT, November 2025",
      30,
      ("hf:MathArena/hmmt_nov_2025",),
      (Layout("data/train-*.parquet"),),
    ),
    Suite(
      "imo_answerbench",
      "IMO-AnswerBench",
      400,
      ("https://github.com/google-deepmind/superhuman/blob/main/imobench/answerbench_v2.csv",),
      (
        Layout("answerbench_v2.csv", "Problem", "Short Answer"),
        Layout("imobench/answerbench_v2.csv", "Problem", "Short Answer"),
      ),
    ),
    Suite(
      "swe_bench_verified",
      "SWE-bench Verified",
      500,
      ("hf:SWE-bench/SWE-bench_Verified", "hf:princeton-nlp/SWE-bench_Verified"),
      (Layout("data/test-*.parquet", "problem_statement", "instance_id"),),
      runs=1,
      max_turns=300,
      kind="repositories",
    ),
  )
}


def find_suite(name: str) -> Suite:
  """Returns the suite of a name; raises ConfigError, with the names that there are."""
  if name not in SUITES:
    raise ConfigError("--suite", f"there is no suite {name!r}.", nearest(name, tuple(SUITES)))
  return SUITES[name]
