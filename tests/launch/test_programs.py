"""The launchers as a user runs them: separate processes on one workdir, stopped by Ctrl-C and run again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time

import openai
import pytest
from toys import processes
from toys.paths import REPOSITORY

from sao_jax.report.metrics import read_metrics

TOKENS = {"return_token_ids": True}
COMMON = ("--config=tests/toys/training_toy.py", "--config.algorithm.critic_warmup_steps=1")


def start(program, workdir, *flags):
  command = [sys.executable, "-m", f"launch.{program}", f"--workdir={workdir}", *COMMON, *flags]
  return subprocess.Popen(
    command,
    cwd=REPOSITORY,
    env=processes.environment(PYTHONPATH=processes.NO_TORCH),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run(program, workdir, *flags):
  process = start(program, workdir, *flags)
  output, _ = process.communicate(timeout=300)
  return process.returncode, output


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("launch")
  code, output = run("sft", workdir)
  assert code == 0, output
  return workdir


@pytest.fixture(scope="module")
def pretrained(workdir):
  code, output = run("pretrain_value", workdir)
  assert code == 0, output
  return output


@pytest.fixture(scope="module")
def interrupted(workdir, pretrained):
  """`launch.train` after a Ctrl-C in the middle of a long run."""
  process = start("train", workdir, "--config.training.steps=100000", "--config.training.checkpoint_every=1000")
  deadline = time.monotonic() + 240
  while len(read_metrics(workdir, "train")) < 4:
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < deadline, "no step in four minutes"
    time.sleep(0.2)
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=120)
  return process.returncode, output


def test_a_policy_is_served_until_ctrl_c_and_followed_by_newer_ones(workdir, interrupted, tmp_path):
  shutil.copytree(workdir / "sft", tmp_path / "sft")
  process = start("serve", tmp_path, "--port=0", "--key=sk-toy", "--follow")
  lines = iter(process.stdout.readline, "")
  url = next(line for line in lines if "served at " in line).split()[-1]
  with openai.OpenAI(base_url=url, api_key="sk-toy", max_retries=0) as client:
    (model,) = client.models.list()
    answer = client.completions.create(model=model.id, prompt=[1, 2], max_tokens=4, extra_body=TOKENS)
    assert set(answer.choices[0].policy_versions) == {0}
    with pytest.raises(openai.AuthenticationError):
      client.with_options(api_key="sk-other").models.list()

    # A run beside saves a checkpoint.
    shutil.copytree(workdir / "train", tmp_path / "coming")
    (tmp_path / "coming").rename(tmp_path / "train")
    deadline = time.monotonic() + 120
    while not set(answer.choices[0].policy_versions) - {0}:
      assert time.monotonic() < deadline, "it was not noticed"
      answer = client.completions.create(model=model.id, prompt=[1, 2], max_tokens=4, extra_body=TOKENS)
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 0 and "Traceback" not in output, output


def test_every_phase_starts_from_the_one_before_it(workdir, pretrained, interrupted):
  assert f"The policy begins from sft, step 3 ({workdir / 'sft'})." in pretrained
  lines = read_metrics(workdir, "value_pretraining")
  assert [line["step"] for line in lines] == [1, 2] and {line["policy_version"] for line in lines} == {0}
  _, output = interrupted
  assert f"The policy begins from value_pretraining, step 2 ({workdir / 'value_pretraining'})." in output
  assert "The critic was not pretrained" not in output and "stopped at step" not in output


def test_ctrl_c_saves_and_exits_cleanly(workdir, interrupted):
  code, output = interrupted
  assert code == 75, output
  assert "Traceback" not in output
  assert "the same command goes on from there" in output
  last = read_metrics(workdir, "train")[-1]["step"]
  assert (workdir / "train" / str(last)).is_dir()


def test_the_same_command_goes_on(workdir, interrupted):
  before = read_metrics(workdir, "train")[-1]
  steps = before["policy_version"] + 2
  code, output = run("train", workdir, f"--config.training.steps={steps}")
  assert code == 0, output
  assert f"going on after step {before['step']}" in output
  lines = read_metrics(workdir, "train")
  assert [line["step"] for line in lines] == list(range(1, before["step"] + 3))
  assert lines[-1]["policy_version"] == steps


def test_a_workdir_of_another_run_is_refused(workdir, interrupted):
  """Another seed has other data and other random numbers: to go on from here would be neither run."""
  before = (workdir / "config.json").read_bytes()
  code, output = run("train", workdir, "--seed=1")
  assert code == 2 and "Traceback" not in output
  assert "holds a run with training.seed=0, this one has 1" in output and "remedy" in output
  assert (workdir / "config.json").read_bytes() == before


def test_evaluate_sample_and_report(workdir, interrupted):
  config_before = (workdir / "config.json").read_bytes()
  code, output = run("evaluate", workdir, "--phase=sft")
  assert code == 0 and "held-out success" in output, output
  record = json.loads((workdir / "evaluation_sft.json").read_text())
  assert record["policy_version"] == 0 and record["heldout_trials"] == 6
  assert record["checkpoint"] == str(workdir / "sft" / "3") and record["seed"] == 0
  assert record["config"] == {"name": "toy", "environment": record["config"]["environment"]}
  assert record["config"]["environment"]["dataclass"] == "Parity"
  assert record["prompts"] == {"split": "heldout", "seed": 20260729, "at_most": 6} and record["temperature"] == 1.0
  # The version is that of the checkpoint, whatever this command line says of the warm-up.
  code, output = run("evaluate", workdir, "--config.algorithm.critic_warmup_steps=3")
  assert code == 0, output
  record = json.loads((workdir / "evaluation_train.json").read_text())
  assert record["policy_version"] == read_metrics(workdir, "train")[-1]["policy_version"]
  code, output = run("sample", workdir, "--prompt=2")
  assert code == 0, output
  assert " prompt |" in output and " action |" in output and "reward" in output
  command = [sys.executable, "-m", "launch.report", f"--workdir={workdir}"]  # needs no --config
  done = subprocess.run(command, cwd=REPOSITORY, env=processes.environment(), capture_output=True, text=True)
  code, output = done.returncode, done.stderr
  assert code == 0 and (workdir / "report" / "index.html").exists(), output
  assert (workdir / "config.json").read_bytes() == config_before


@pytest.mark.parametrize(
  "flag, field",
  [
    ("--config.algorithm.epsilon_lo=0.3", "algorithm.epsilon_lo"),
    ("--config.rollout.batch_size=many", "rollout.batch_size"),
    ("--config.sampler.temperature=0", "sampler.temperature"),
    ("--config.sampler.top_p=0.9", "sampler.top_p"),
    ("--config.mesh.tensor=3", "mesh"),
    ("--config.sampler.context_length=2", "sampler.context_length"),
    ("--workdir=/proc/none/run", "--workdir"),
  ],
)
def test_bad_input_is_one_screen_that_names_field_and_remedy(tmp_path, flag, field):
  code, output = run("train", tmp_path, flag)
  assert code == 2, output
  assert "Traceback" not in output
  error = output[output.index("error: ") :]
  assert field in error.splitlines()[0]
  assert "remedy: " in error
  assert len(error.splitlines()) <= 12
  assert not (tmp_path / "train").exists() or not any((tmp_path / "train").iterdir())
