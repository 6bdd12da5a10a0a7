"""The command line: overrides reach the frozen configuration, and bad input ends with one screen and status 2."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
from absl import flags
from toys.paths import REPOSITORY

from launch import _flags
from sao_jax.config import AlgorithmConfig, MeshConfig, RunConfig
from sao_jax.configuration import config_tree, listing
from sao_jax.configuration.run_record import check_viewed, write_config
from sao_jax.errors import ConfigError

CONFIG = """
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sao_jax.config import RolloutConfig, RunConfig
from sao_jax.data.tokenizer import ByteTokenizer


@dataclasses.dataclass(frozen=True)
class Inner:
  tries: int = 3
  names: tuple[str, ...] = ("a", "b")


@dataclasses.dataclass(frozen=True)
class Toy:
  name: str = "toy"
  operands: int = 3
  scale: float = 1.0
  strict: bool = True
  limit: float | None = None  # of nothing
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  inner: Inner = Inner()

  def tokenizer(self):
    return ByteTokenizer()

  def make(self, tokenizer):
    raise NotImplementedError

  def prompts(self, tokenizer, split, seed):
    raise NotImplementedError


def get_config() -> RunConfig:
  return RunConfig(environment=Toy(), name="toy run", rollout=RolloutConfig(batch_size=64))
"""


@pytest.fixture
def config_file(tmp_path):
  path = tmp_path / "toy.py"
  path.write_text(CONFIG)
  return str(path)


def parse(config_file, *arguments, workdir="runs/x"):
  argv = ["launcher", f"--config={config_file}", f"--workdir={workdir}", *arguments]
  return _flags.parse(argv, flags.FlagValues())[0]


def test_without_overrides_the_file_decides(config_file):
  config, workdir = _flags.parse(["launcher", "--config", config_file, "--workdir", "runs/x"], flags.FlagValues())
  assert workdir == "runs/x"
  assert isinstance(config, RunConfig) and config.name == "toy run" and config.rollout.batch_size == 64
  assert config.algorithm == AlgorithmConfig()
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.name = "other"


@pytest.mark.parametrize(
  "argument, path, value",
  [
    ("--config.algorithm.epsilon_low=0.25", "algorithm.epsilon_low", 0.25),
    ("--config.algorithm.epsilon_high=3", "algorithm.epsilon_high", 3.0),
    ("--config.policy_optimizer.learning_rate=1e-3", "policy_optimizer.learning_rate", 1e-3),
    ("--config.sft.optimizer.warmup_steps=7", "sft.optimizer.warmup_steps", 7),
    ("--config.name=a b", "name", "a b"),
    ("--config.name=7", "name", "7"),
    ("--config.model.checkpoint=", "model.checkpoint", ""),
    ("--config.algorithm.whiten_advantages=false", "algorithm.whiten_advantages", False),
    ("--noconfig.algorithm.whiten_advantages", "algorithm.whiten_advantages", False),
    ("--config.algorithm.whiten_advantages", "algorithm.whiten_advantages", True),
    ("--config.algorithm.whiten_advantages=True", "algorithm.whiten_advantages", True),
    ("--config.algorithm.whiten_advantages=auto", "algorithm.whiten_advantages", "auto"),
    ("--config.algorithm.freeze_router", "algorithm.freeze_router", True),
    ("--config.rollout.row_lengths=(64, 256)", "rollout.row_lengths", (64, 256)),
    ("--config.rollout.row_lengths=64,256", "rollout.row_lengths", (64, 256)),
    ("--config.rollout.row_lengths=256", "rollout.row_lengths", (256,)),
    ("--config.sampler.window_buckets=(16,)", "sampler.window_buckets", (16,)),
    ("--config.environment.operands=5", "environment.operands", 5),
    ("--config.environment.scale=2", "environment.scale", 2.0),
    ("--config.environment.limit=2", "environment.limit", 2.0),
    ("--config.environment.limit=None", "environment.limit", None),
    ("-config.training.audit=F", "training.audit", False),
    ("--config.algorithm.truncation=mask", "algorithm.truncation", "mask"),
    ("--config.model.lora.targets=('mlp',)", "model.lora.targets", ("mlp",)),
    ("--config.rollout.row_lengths=[64, 256]", "rollout.row_lengths", (64, 256)),
    ("--config.algorithm.epsilon_high=inf", "algorithm.epsilon_high", float("inf")),
    ("--config.environment.inner.tries=9", "environment.inner.tries", 9),
    ("--config.environment.inner.names=('x', 'y')", "environment.inner.names", ("x", "y")),
    ("--config.sampler.mesh.tensor=2", "sampler.mesh", MeshConfig(tensor=2)),  # a section that is not there before
    ("--seed=11", "training.seed", 11),
  ],
)
def test_an_override_changes_that_field_alone(config_file, argument, path, value):
  default, config = parse(config_file), parse(config_file, argument)
  assert config_tree.get(config, path) == value and type(config_tree.get(config, path)) is type(value)
  changed = {change[0] for change in config_tree.differences(config_tree.to_json(default), config_tree.to_json(config))}
  assert changed <= {path}


def test_a_mapping_is_replaced_as_a_whole(config_file):
  options = parse(config_file, "--config.environment.options={'a': 1}", "--config.environment.options={'b': [2]}")
  assert options.environment.options == {"b": [2]}


def test_overrides_add_up_and_the_last_one_wins(config_file):
  config = parse(
    config_file, "--config.training.steps", "5", "--config.training.steps=6", "--config.environment.limit=2",
    "--config.environment.strict=false", "--config.environment.limit=None",
  )  # fmt: skip
  assert config.training.steps == 6 and config.environment.limit is None and config.environment.strict is False


@pytest.mark.parametrize(
  "argument, field, remedy",
  [
    ("--config.algorithm.epsilon_lo=0.3", "algorithm.epsilon_lo", "algorithm.epsilon_low"),
    ("--config.epsilon_low=0.3", "epsilon_low", "Did you mean algorithm.epsilon_low?"),
    ("--config.learning_rate=1", "learning_rate", "policy_optimizer.learning_rate or critic_optimizer.learning_rate"),
    ("--config.algoritm.epsilon_low=0.3", "algoritm.epsilon_low", "Did you mean algorithm.epsilon_low?"),
    ("--config.environment.operand=5", "environment.operand", "environment.operands"),
    ("--config.environment.inner.trys=5", "environment.inner.trys", "environment.inner.tries"),
    ("--config.training.steps.more=5", "training.steps.more", "training.steps"),
    ("--config.zzzzzzzz=5", "zzzzzzzz", "sao_jax/config.py"),
    ("--noconfig.whiten", "whiten", ""),
    ("--config.algorithm=5", "algorithm", "algorithm.epsilon_low, algorithm.epsilon_high"),
    ("--config.environment={}", "environment", "environment.operands"),
  ],
)
def test_an_unknown_field_is_refused_with_the_nearest_names(config_file, argument, field, remedy):
  with pytest.raises(ConfigError) as error:
    parse(config_file, argument)
  assert error.value.field == field and remedy in error.value.remedy


@pytest.mark.parametrize(
  "argument, field, got, expected, remedy",
  [
    ("--config.algorithm.epsilon_low=much", "algorithm.epsilon_low", "'much'", "expected float", "as in 0.3"),
    ("--config.training.steps=1.5", "training.steps", "'1.5'", "expected int", "whole number"),
    ("--config.training.steps=1e3", "training.steps", "'1e3'", "expected int", "whole number"),
    ("--config.training.steps", "training.steps", "no value", "", "--config.training.steps=VALUE"),
    ("--noconfig.training.steps", "training.steps", "true or false", "", "--config.training.steps=VALUE"),
    ("--noconfig.training.audit=true", "training.audit", "to false", "", "--config.training.audit=VALUE"),
    ("--config.rollout.row_lengths=", "rollout.row_lengths", "''", "tuple of int", "(1, 2)"),
    ("--config.environment.options=[1]", "environment.options", "[1]", "expected Mapping", "Mapping"),
    ("--config.training.audit=maybe", "training.audit", "'maybe'", "expected true or false", "true or false"),
    ("--config.rollout.row_lengths=(64, 'x')", "rollout.row_lengths", "(64, 'x')", "tuple of int", "(1, 2)"),
    ("--config.rollout.row_lengths=long", "rollout.row_lengths", "'long'", "tuple of int", "(1, 2)"),
    ("--config.environment.limit=abc", "environment.limit", "'abc'", "expected float or None", "float or None"),
    ("--config.environment.inner.names=(1, 2)", "environment.inner.names", "(1, 2)", "tuple of str", "tuple of str"),
  ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(config_file, argument, field, got, expected, remedy):
  with pytest.raises(ConfigError) as error:
    parse(config_file, argument)
  message = str(error.value)
  assert field in message and got in message and expected in message and remedy in error.value.remedy


@pytest.mark.parametrize(
  "argv, field, remedy",
  [
    (["--workdir=x"], "--config", "--config=configs/"),
    (["--config=no/such.py", "--workdir=x"], "--config", "configs/"),
    (["--config=FILE"], "--workdir", "--workdir=runs/a"),
    (["--config=FILE", "--workdir="], "--workdir", "--workdir=runs/a"),
    (["--config=FILE", "--workdir=x", "--workdri=y"], "command line", "--help"),
    (["--config=FILE", "--workdir=x", "config.training.steps=5"], "command line", "begin with --"),
    (["--config=FILE", "--workdir=x", "--seed=-1"], "command line", "--help"),
    (["--config=FILE", "--workdir=x", "--seed=x"], "command line", "--help"),
  ],
)
def test_flags_that_are_missing_or_unknown(config_file, argv, field, remedy):
  with pytest.raises(ConfigError) as error:
    _flags.parse(["launcher", *(argument.replace("FILE", config_file) for argument in argv)], flags.FlagValues())
  assert error.value.field == field and remedy in error.value.remedy


@pytest.mark.parametrize(
  "name, text, problem",
  [
    ("a.py", "x = 1", "defines no get_config"),
    ("a.py", "def get_config(): return {'model': 1}", "returned a dict"),
    ("a.txt", "def get_config(): pass", "not a Python file"),
    (
      "a.py",
      "from sao_jax.config import *\ndef get_config(): return RunConfig(None, model=ModelConfig(rope_theta='x'))",
      "expected float",
    ),
    (
      "a.py",
      "from sao_jax.config import *\ndef get_config(): return RunConfig(None, model=ModelConfig(num_layer=2))",
      r"(?s)ModelConfig.num_layer: there is no such field; .*a.py sets it.\n  remedy: Did you mean num_layers or num_",
    ),
    (
      "a.py",
      CONFIG.replace("environment=Toy()", "environment=Toy(frequency=2)"),
      r"(?s)Toy.frequency: there is no such field.*Its fields are name, operands, scale, strict, limit, options, in",
    ),
  ],
)
def test_config_files_that_are_none(tmp_path, name, text, problem):
  (tmp_path / name).write_text(text)
  with pytest.raises(ConfigError, match=problem):
    _flags.load_config(str(tmp_path / name))


def test_other_errors_of_a_config_file_are_shown_as_they_are(tmp_path):
  (tmp_path / "a.py").write_text("def get_config(): return dict(a=1) + 1")
  with pytest.raises(TypeError, match="unsupported operand"):
    _flags.load_config(str(tmp_path / "a.py"))


def test_a_config_is_found_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.setattr(_flags, "REPOSITORY", tmp_path / "repository")
  (tmp_path / "repository" / "configs").mkdir(parents=True)
  (tmp_path / "repository" / "configs" / "toy.py").write_text(CONFIG)
  monkeypatch.chdir(tmp_path)
  assert _flags.load_config("configs/toy.py").name == "toy run"
  with pytest.raises(ConfigError, match="Choose one of configs/toy.py"):
    _flags.load_config("configs/toi.py")


@pytest.mark.parametrize("place", ["below a file", "/proc/sao_jax/run", "s3://bucket/run"])
def test_a_workdir_that_cannot_be_written(tmp_path, place):
  (tmp_path / "file").write_text("")
  workdir = str(tmp_path / "file" / "run") if place == "below a file" else place
  with pytest.raises(ConfigError) as error:
    _flags.check_writable(workdir)
  assert error.value.field == "--workdir" and workdir in error.value.problem and "--workdir" in error.value.remedy


def test_a_writable_workdir_is_created_and_left_empty(tmp_path):
  _flags.check_writable(str(tmp_path / "a" / "b"))
  assert list((tmp_path / "a" / "b").iterdir()) == []


LAUNCHER = """
import sys
from absl import flags, logging
from launch import _flags
from sao_jax.errors import ConfigError, RunError
_FAIL = flags.DEFINE_boolean("fail", False, "Raise a ConfigError.")
_END = flags.DEFINE_enum("end", None, ["run", "disk"], "Raise an error from outside.")

def main(config, workdir):
  logging.info("steps %d", config.training.steps)
  if _FAIL.value:
    raise ConfigError("mesh.tensor", "3 devices do not divide 4 heads.", "Choose a divisor.")
  if _END.value == "run":
    raise RunError("the disk is full. Make room.") from OSError("28")
  if _END.value == "disk":
    raise OSError(28, "No space left on device", workdir)
  return "anything"

_flags.run(main)
"""


def launch(tmp_path, *arguments):
  script = tmp_path / "launcher.py"
  script.write_text(LAUNCHER)
  environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  return subprocess.run(
    [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=120
  )


def test_a_launcher_runs_with_flags_of_its_own(config_file, tmp_path):
  done = launch(tmp_path, f"--config={config_file}", f"--workdir={tmp_path / 'run'}", "--config.training.steps=42")
  assert done.returncode == 0, done.stderr
  assert "steps 42" in done.stderr
  assert list((tmp_path / "run").iterdir()) == []  # the record is written by the run, once it has begun


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["--fail"], ["mesh.tensor", "3 devices do not divide 4 heads", "remedy: Choose a divisor."]),
    (["--config.training.step=1"], ["training.step:", "Did you mean training.steps"]),
    (["--config.algorithm.epsilon_low=7"], ["algorithm.epsilon_low", "(0, 1]", "remedy"]),
    (["--workdir=/proc/run"], ["--workdir", "/proc/run", "remedy"]),
  ],
)
def test_bad_input_is_one_screen_and_status_2(config_file, tmp_path, arguments, words):
  done = launch(tmp_path, f"--config={config_file}", f"--workdir={tmp_path / 'run'}", *arguments)
  assert done.returncode == 2
  assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 12
  assert done.stderr.count("error: ") == 1 and all(word in done.stderr for word in words)


@pytest.mark.parametrize(
  "end, says",
  [
    ("run", "the disk is full. Make room."),
    ("disk", "No space left on device: {run}. Make room, and run the same command again."),
  ],
)
def test_a_run_that_ends_for_a_reason_outside_says_it_last_and_without_a_traceback(config_file, tmp_path, end, says):
  run = tmp_path / "run"
  done = launch(tmp_path, f"--config={config_file}", f"--workdir={run}", f"--end={end}")
  assert done.returncode == 1 and "Traceback" not in done.stderr
  assert done.stderr.splitlines()[-1] == "error: " + says.format(run=run)


def test_any_other_error_keeps_its_traceback(capsys):
  assert _flags._said(OSError(28, "No space left on device")) == 1
  assert capsys.readouterr().err == "error: No space left on device. Make room, and run the same command again.\n"
  assert _flags._said(PermissionError(13, "Permission denied")) is None
  assert capsys.readouterr().err == ""


def test_help_needs_no_config(tmp_path):
  done = launch(tmp_path, "-h")
  assert done.returncode == 0
  text = done.stdout + done.stderr
  assert "--workdir" in text and "--seed" in text and "--config" in text and "--[no]fail" in text
  assert "Traceback" not in text
  for path, value, _ in config_tree.leaves(RunConfig(environment=None)):
    assert f"  {path} = {value!r}" in text


def test_help_lists_the_fields_of_a_config_with_types_bounds_values_and_comments(config_file, tmp_path):
  done = launch(tmp_path, f"--config={config_file}", "--help", "--config.training.steps=5")
  assert "Traceback" not in done.stderr and "--[no]fail" in done.stdout
  fields = done.stdout[done.stdout.index("Fields of --config") :].splitlines()
  assert max(map(len, fields)) <= listing.WIDTH
  wanted = {  # what follows a field on its line, and on the next one
    "name = 'toy run'": ("str", ""),
    "environment.limit = None": ("float or None", "of nothing"),
    "environment.inner.names = ('a', 'b')": ("a tuple of str", ""),
    "model.lora.targets = ('attention', 'mlp')": ("a tuple of attention | mlp", "mlp: feed-forward layers"),
    "algorithm.epsilon_low = 0.3": ("float in (0, 1]", "deltas, not bounds"),
    "algorithm.truncation = 'zero'": ("zero | bootstrap | mask", "what follows a trajectory that was cut"),
    "rollout.batch_size = 64": ("int in [1, inf)", "trajectories per train step"),
    "training.audit = True": ("true or false", "compare sampler and learner"),
  }
  for assignment, (kind, comment) in wanted.items():
    (index,) = (i for i, line in enumerate(fields) if line.startswith(f"  {assignment} "))
    assert fields[index].removeprefix(f"  {assignment}").strip() == kind
    assert fields[index + 1].strip().startswith(comment)


def test_a_program_that_looks_at_a_run_takes_its_configuration(tmp_path):
  """Recorded, without --config; changed by overrides; refused where --config is that of another run."""
  read = lambda *argv: _flags.read(["launcher", f"--workdir={tmp_path}", *argv], flags.FlagValues(), viewing=True)
  with pytest.raises(ConfigError, match="--config: it is missing"):
    read()
  recorded = config_tree.replace(_flags.load_config("configs/calculator.py"), {"model.d_model": 32})
  write_config(recorded, tmp_path)
  assert read().config == recorded and read().explicit == frozenset()
  looser = read("--config.evaluation.prompts=7", "--config.environment.max_operand=3")
  assert looser.config == config_tree.replace(recorded, {"evaluation.prompts": 7, "environment.max_operand": 3})
  check_viewed(looser.config, tmp_path, looser.explicit)
  with pytest.raises(ConfigError, match="model.d_model=32, this configuration has 64"):
    check_viewed(read("--config=configs/calculator.py").config, tmp_path)
  with pytest.raises(ConfigError, match="--workdir: there is no directory"):
    _flags.read(["launcher", f"--workdir={tmp_path / 'none'}"], flags.FlagValues(), viewing=True)
  with pytest.raises(ConfigError, match="--config: it is missing"):
    _flags.read(["launcher", f"--workdir={tmp_path}"], flags.FlagValues())  # a program that trains


def test_what_lies_beside_a_config_file_can_be_imported_by_it(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "path", list(sys.path))
  (tmp_path / "things_beside_it.py").write_text("NAME = 'beside'")
  (tmp_path / "a.py").write_text(
    CONFIG.replace("import dataclasses", "import dataclasses\nimport things_beside_it", 1).replace(
      '"toy run"', "things_beside_it.NAME"
    )
  )
  monkeypatch.chdir(tmp_path.parent)
  assert _flags.load_config(f"{tmp_path.name}/a.py").name == "beside"
  assert sys.path[-1] == str(tmp_path)  # behind everything that is installed


def test_comments_are_those_of_the_source():
  assert listing.comments(RunConfig) == dict.fromkeys(config_tree.annotations(RunConfig(environment=None)), "")
  assert listing.comments(AlgorithmConfig)["critic_warmup_steps"] == "critic-only steps at the start of RL"
  assert listing.comments(dataclasses.make_dataclass("Unwritten", ["a"])) == {}


def program(name, *arguments):
  """A launcher of the project, from its command line to its end."""
  return subprocess.run(
    [sys.executable, "-m", f"launch.{name}", *arguments],
    cwd=REPOSITORY, env=dict(os.environ, XLA_FLAGS=""), capture_output=True, text=True, timeout=120,
  )  # fmt: skip


def test_the_configuration_is_printed_and_what_changed_is_marked(config_file):
  done = program("config", f"--config={config_file}", "--config.algorithm.epsilon_low=0.5", "--seed=0")
  assert done.returncode == 0 and not done.stderr, done.stderr
  lines = done.stdout.splitlines()
  assert [line.split()[1] for line in lines if line.startswith("*")] == ["algorithm.epsilon_low"]
  index = next(i for i, line in enumerate(lines) if line.startswith("*"))
  assert "= 0.5 " in lines[index] and lines[index + 1].strip() == "was 0.3"
  refused = program("config", f"--config={config_file}", "--config.sampler.top_k=3")
  assert refused.returncode == 2 and refused.stderr.startswith("error: sampler.top_k: training with top_k=3")
  assert "* sampler.top_k = 3" in refused.stdout


@pytest.mark.parametrize("name", ["sft", "pretrain_value", "train", "replay"])
def test_a_program_validates_once(tmp_path, name):
  """One that ends at a mesh that does not fit has validated before; what is probably not meant is said once."""
  flags_of_it = ("--config=tests/toys/training_toy.py", f"--workdir={tmp_path}", "--config.mesh.tensor=3")
  done = program(name, *flags_of_it, "--config.rollout.max_staleness=0")
  assert done.returncode == 2 and "error: mesh" in done.stderr, done.stderr
  assert done.stderr.count("is below rollout.admission_staleness") == 1


def test_what_only_training_refuses_is_refused_before_anything_is_written(tmp_path):
  flags_of_it = ("--config=tests/toys/training_toy.py", f"--workdir={tmp_path / 'run'}", "--config.sampler.top_p=0.9")
  done = program("train", *flags_of_it)
  assert done.returncode == 2 and "error: sampler.top_p" in done.stderr, done.stderr
  assert list(tmp_path.iterdir()) == []
