"""Benchmarks of a few problems in the published layouts, and a sampler that is right in a known part of its attempts.

As a script, to be killed: python suite_toy.py DATA FOLDER RUNS.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import pathlib
import re
import sys
import threading
from unittest import mock

from sao_jax.config import RunConfig
from sao_jax.configuration.paths import expand
from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.calculator import Calculator
from sao_jax.evaluation import suite_run
from sao_jax.evaluation.suite import SUITES
from sao_jax.evaluation.suite_data import find_data
from sao_jax.evaluation.suite_environment import suite_config
from sao_jax.evaluation.suite_result import summarize
from sao_jax.parallel.agreement import ALONE
from sao_jax.parallel.process import WHOLE
from toys import training_toy
from toys.rollout_fakes import FakeSampler, completion

COUNT, TOKENIZER = 4, ByteTokenizer()
_OF_THREAD = threading.local()
ROWS = [(f"What is {number}+1?", str(number + 1)) for number in range(COUNT)]


def write_lines(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  return path


def write_parquet(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
  import pyarrow
  import pyarrow.parquet

  path.parent.mkdir(parents=True, exist_ok=True)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  return path


def publish(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Writes every benchmark of questions as it was published; returns where, by the suite's name and the layout."""
  problems = [{"problem": question, "answer": answer} for question, answer in ROWS]
  opencompass = [{"question": question, "answer": answer} for question, answer in ROWS]
  write_lines(folder / "aime25" / "test.jsonl", [row | {"id": str(i)} for i, row in enumerate(problems)])
  write_lines(folder / "opencompass" / "aime2025-I.jsonl", opencompass[:2])
  write_lines(folder / "opencompass" / "aime2025-II.jsonl", opencompass[2:])
  numbered = [row | {"problem_idx": i, "problem_type": ["Algebra"]} for i, row in enumerate(problems, 1)]
  write_parquet(folder / "hmmt" / "data" / "train-00000-of-00001.parquet", numbered)
  integers = [row | {"answer": int(row["answer"])} for row in problems]
  write_parquet(folder / "beyond" / "data" / "test-00000-of-00001.parquet", integers)

  # Problems of IMO-AnswerBench have line breaks; one of its answers cannot be compared with.
  (folder / "imobench").mkdir()
  with (folder / "imobench" / "answerbench_v2.csv").open("w", encoding="utf-8", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["Problem ID", "Problem", "Short Answer", "Category", "Subcategory", "Source"])
    for number, (question, answer) in enumerate(ROWS):
      gold = "$(2k-1)!!$" if number == 2 else f"${answer}$."
      writer.writerow([f"imo-bench-algebra-{number:03d}", f"{question}\n", gold, "Algebra", "Other", "none"])
    file.write('imo-bench-algebra-036,"Find all.\n,$3$""",Algebra,Other,none\n')  # as in the published file
  for name in ("answerbench.csv", "proofbench_v2.csv"):  # which are none of it
    (folder / "imobench" / name).write_text("Problem ID,Problem\n")
  return {
    "aime25": folder / "aime25",
    "aime25 opencompass": folder / "opencompass",
    "hmmt_nov_2025": folder / "hmmt",
    "beyondaime": folder / "beyond",
    "imo_answerbench": folder,
  }


def is_right(problem: int, run: int) -> bool:
  """Problem 0 is never solved, problem 3 always, the others in some runs."""
  return (run * 5 + problem * 3) % 7 < 2 * problem + 1 if problem else False


def reply(request):
  """Says the right answer of the question in the prompt, or another one; the text is longer in later runs."""
  problem, run = request.rollout_id % COUNT, request.rollout_id // COUNT
  question = TOKENIZER.decode(request.new_token_ids)
  right = int(re.search(r"What is (\d)\+1", question)[1]) + 1
  said = f"{'h' * run}<|answer|>{right if is_right(problem, run) else right + 5}<|end|>"
  return completion(TOKENIZER.encode_with_specials(said).tolist(), version=7, stop_ids=request.stop_ids)


def get_config(**rollout) -> RunConfig:
  config = training_toy.replace(
    training_toy.get_config(),
    model={"vocab_size": TOKENIZER.vocab_size, "num_experts": 0, "d_ff": 16},
    sampler={"context_length": 64, "num_slots": 3, "prefill_batch": 1},
    rollout={"max_tokens_per_turn": 24, "max_tokens": 24, "row_lengths": (64,)} | rollout,
  )
  return dataclasses.replace(config, environment=Calculator())


@contextlib.contextmanager
def samplers():
  """Has every thread sample with the sampler of its own `run`."""
  with mock.patch.object(suite_run, "make_service", lambda *given, **more: contextlib.nullcontext(_OF_THREAD.sampler)):
    yield


def run(data, folder, runs, **options):
  """Runs a suite with a scripted sampler, see `run_here`."""
  with samplers():
    return run_here(data, folder, runs, **options)


def run_here(
  data,
  folder,
  runs,
  *,
  suite="aime25",
  scorer="integer",
  sampler=None,
  config=None,
  tools="none",
  judge=None,
  **options,
):
  """Does it within `samplers`; `scorer` stands for math-verify, which takes a second to be imported."""
  _OF_THREAD.sampler = sampler or FakeSampler(reply=reply, version=7)
  suite = SUITES[suite]
  found = find_data(suite, str(data))
  config = suite_config(config or get_config(), suite, found, tools=tools, judge=judge)
  if scorer is not None:
    environment = dataclasses.replace(config.environment, scorer=scorer, grader_processes=1)
    config = dataclasses.replace(config, environment=environment)
  identity = suite_run.identity_of(config, suite, found, {"step": 3})
  options = {"processes": ALONE, "share": WHOLE} | options
  episodes = suite_run.run_suite(config, None, 7, expand(folder), identity, runs=runs, **options)
  return None if episodes is None else summarize(suite, episodes, runs)


if __name__ == "__main__":
  run(
    sys.argv[1], sys.argv[2], int(sys.argv[3]), sampler=FakeSampler(reply=reply, delay=lambda number: 0.02, version=7)
  )
