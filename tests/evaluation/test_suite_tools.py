"""Benchmarks with tools, in real sandboxes: a Python tool for questions, and repositories whose patches are kept."""

from __future__ import annotations

import dataclasses
import json

import pytest
from toys import judge_server, repositories, sandboxes, suite_toy, training_toy
from toys.rollout_fakes import FakeSampler, completion

from sao_jax.data.tokenizer import ByteTokenizer
from sao_jax.environments.mixture import Mixture, Part
from sao_jax.environments.python_tool import TOOL_INSTRUCTION, PythonTool
from sao_jax.environments.question_answer import QuestionAnswer
from sao_jax.environments.repository_record import SWEBENCH
from sao_jax.environments.repository_task import RepositoryTask
from sao_jax.environments.wrappers import SimulatedLatency
from sao_jax.evaluation import swe_bench
from sao_jax.evaluation.suite import SUITES
from sao_jax.evaluation.suite_data import find_data
from sao_jax.evaluation.suite_environment import BOXED, equality_judge, suite_config
from sao_jax.evaluation.suite_episodes import read_episodes

TOKENIZER = ByteTokenizer()
QUESTIONS = [{"problem": question, "answer": answer} for question, answer in suite_toy.ROWS]
TASK = {
  "instance_id": "toy__m-1", "base_commit": "", "problem_statement": "2+3", "patch": "", "test_patch": "",
  "snapshot": {"m.py": "x = 1\n"}, "FAIL_TO_PASS": [], "PASS_TO_PASS": [],
}  # fmt: skip

needs_sandbox = pytest.mark.skipif(bool(sandboxes.missing()), reason=sandboxes.missing())


def get_config(environment):
  config = training_toy.replace(suite_toy.get_config(), sampler={"context_length": 8192})
  config = training_toy.replace(config, rollout={"max_tokens": 4096, "max_tokens_per_turn": 512})
  return dataclasses.replace(config, environment=environment)


def says(text, request):
  ids = TOKENIZER.encode_with_specials(f"{text}<|end|>").tolist()
  return completion(ids, version=7, stop_ids=request.stop_ids)


@needs_sandbox
def test_questions_are_answered_with_the_python_tool_and_its_use_is_counted(tmp_path):
  """Half of the attempts compute, the others call what there is not, and guess."""

  def reply(request):
    text = TOKENIZER.decode(request.new_token_ids)
    run = request.rollout_id // 2  # of two problems
    if "<|observation|>" in text:
      seen = text.partition("<|observation|>")[2].partition("<|end|>")[0]
      return says(f"<|answer|>{seen.strip() if run == 0 else 99}", request)
    question = text.rpartition("What is ")[2].partition("?")[0]
    return says(f"<|tool_call|>python print({question})" if run == 0 else "<|tool_call|>calculator {}", request)

  data = suite_toy.write_lines(tmp_path / "test.jsonl", QUESTIONS[:2])
  environment = PythonTool("unused.jsonl", limits=sandboxes.SMALL, warm=0, grader_processes=1)
  sampler = FakeSampler(reply=reply, version=7)
  result = suite_toy.run(
    data, tmp_path / "run", 2, tools="python", config=get_config(environment), sampler=sampler, scorer="integer"
  )
  assert result.run_means == (1.0, 0.0) and result.graded == 4
  assert result.per_episode["turns"] == 2 and result.per_episode["tool_calls"] == 1
  assert result.per_episode["tool_errors"] == 0.5
  assert result.pass_at == {1: 0.5, 2: 1.0}


@needs_sandbox
def test_repositories_leave_predictions_in_the_official_form(tmp_path):
  turns = ["<|tool_call|>bash echo 'x = 2' > m.py", "<|tool_call|>submit {}"]

  def reply(request):
    begins = "<|user|>" in TOKENIZER.decode(request.new_token_ids)
    return says(turns[0 if begins else 1], request)

  data = suite_toy.write_lines(tmp_path / "tasks.jsonl", [TASK])
  own = repositories.make_task(str(data), tests="functions")
  sampler = FakeSampler(reply=reply, version=7)
  options = {"suite": "swe_bench_verified", "scorer": None, "sampler": sampler, "config": get_config(own)}
  result = suite_toy.run(data, tmp_path / "run", 1, **options)
  assert result.graded == 1 and result.per_episode["tool_calls"] == 2

  # Nothing is graded here: the reward is that of the official harness.
  (episode,) = read_episodes(tmp_path / "run").values()
  assert swe_bench.write_predictions(tmp_path / "predictions.0.jsonl", [episode], "toy") == 1
  (line,) = (tmp_path / "predictions.0.jsonl").read_text().splitlines()
  written = json.loads(line)
  assert (written["instance_id"], written["model_name_or_path"]) == ("toy__m-1", "toy")
  assert "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n" in written["model_patch"]


def test_the_chat_and_the_tools_of_the_run_are_kept(tmp_path):
  data = find_data(SUITES["aime25"], str(suite_toy.write_lines(tmp_path / "test.jsonl", QUESTIONS)))
  of = lambda environment, **options: suite_config(
    dataclasses.replace(suite_toy.get_config(), environment=environment), SUITES["aime25"], data, **options
  )
  chat = {"tokenizer_folder": "models/x", "template_options": {"enable_thinking": True}}
  run = Mixture(
    (
      Part(SimulatedLatency(PythonTool("a.jsonl", call_timeout=3.0, call_format="glm", scorer="text", **chat))),
      Part(QuestionAnswer("b.jsonl", name="b", tokenizer_folder="models/x")),
    )
  )
  with_tool, plain = (of(run, tools=tools).environment for tools in ("python", "none"))
  assert type(with_tool) is PythonTool and (with_tool.call_timeout, with_tool.call_format) == (3.0, "glm")
  assert with_tool.system_prompt == f"{TOOL_INSTRUCTION} {BOXED}" and with_tool.name == "aime25"
  assert type(plain) is QuestionAnswer and plain.system_prompt == BOXED and plain.answer_in == "reply"
  for environment in (with_tool, plain):
    assert (environment.tokenizer_folder, environment.template_options) == tuple(chat.values())
    assert (environment.scorer, environment.data, environment.heldout_data) == ("boxed_math", data.path, data.path)

  # A judge grades in place of math-verify, and says right or wrong.
  judge = equality_judge("http://127.0.0.1:1/v1", "judge")
  assert of(run, tools="none", judge=judge).environment.scorer is judge and (judge.low, judge.high) == (0.0, 1.0)


def test_images_are_those_of_the_records_or_the_published_ones(tmp_path):
  suite = SUITES["swe_bench_verified"]
  without = {name: value for name, value in TASK.items() if name != "snapshot"}
  for number, (record, image) in enumerate([(TASK, ""), (without, SWEBENCH), (without | {"image": "x:1"}, "image")]):
    data = find_data(suite, str(suite_toy.write_lines(tmp_path / f"{number}.jsonl", [record])))
    config = suite_config(suite_toy.get_config(), suite, data)
    task = config.environment
    assert type(task) is RepositoryTask and (task.image, task.tests, task.data) == (image, "none", data.path)
    assert config.rollout.max_turns == 300 and config.rollout.environment_timeout > task.longest_answer


def test_a_judge_grades_what_math_verify_cannot_read(tmp_path):
  """The published answer of the third problem is none that math-verify reads; the judge finds run 1 right."""
  pytest.importorskip("openai", reason="the extra `judge` is not installed")
  reply = lambda request: says(f"<|answer|>worth {request.rollout_id // 5}", request)
  folder = suite_toy.publish(tmp_path)["imo_answerbench"]
  with judge_server.serve() as server:
    options = {"suite": "imo_answerbench", "scorer": None, "judge": equality_judge(server.url, "fine")}
    result = suite_toy.run(folder, tmp_path / "run", 2, sampler=FakeSampler(reply=reply, version=7), **options)
  assert (result.problems, result.skipped, result.run_means) == ((0, 1, 2, 3), 1, (0.0, 1.0))
  assert all("$(2k-1)!!$" in each["messages"][0]["content"] for each in server.requests if "2+1" in str(each))
