"""From a Hugging Face folder through a run and back, as the launchers do it."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from toys import hf_toy, training_toy

from launch import _flags
from sao_jax.chat.hf_tokenizer import HFTokenizer
from sao_jax.checkpoints.checkpointer import Checkpointer, load_params
from sao_jax.config import MODEL_CHECKPOINT
from sao_jax.configuration.relations import validate
from sao_jax.configuration.run_record import write_config
from sao_jax.errors import ConfigError
from sao_jax.huggingface import convert
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.pretrained import with_folder_shape
from sao_jax.huggingface.safetensors_file import read_header
from sao_jax.learner import setup
from sao_jax.training import phases

TIED = dataclasses.replace(hf_toy.TIED, vocab_size=training_toy.VOCABULARY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder, params = hf_toy.make_folder(tmp_path_factory.mktemp("hf") / "model", TIED)
  (folder.path / "tokenizer.json").write_text("{}")
  return folder, params


def equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_the_folder_decides_the_shape(folder):
  config = training_toy.replace(training_toy.get_config(), model={"remat": "full"})
  assert with_folder_shape(config) == config  # starts from nothing
  config = training_toy.replace(config, model={"checkpoint": str(folder[0].path)})
  shaped = with_folder_shape(config)
  assert shaped.model == dataclasses.replace(TIED, remat="full", checkpoint=str(folder[0].path))
  assert dataclasses.replace(shaped, model=config.model) == config
  with_folder_shape(shaped, ["model.num_layers", "model.remat"])  # said again, and no shape
  with pytest.raises(ConfigError, match="model.num_experts: 2 was set, .* has 0"):
    with_folder_shape(config, ["model.num_experts"])


def test_the_command_line(folder, tmp_path):
  argv = ["train", "--config=tests/toys/training_toy.py", f"--workdir={tmp_path}"]
  argv.append(f"--config.model.checkpoint={folder[0].path}")
  config, _ = _flags.parse([*argv, "--config.model.dtype=bfloat16"], flag_values=_flags.flags.FlagValues())
  assert config.model.tie_embeddings and config.model.d_model == TIED.d_model and config.model.dtype == "bfloat16"
  with pytest.raises(ConfigError, match="model.d_model: 32 was set"):
    _flags.parse([*argv, "--config.model.d_model=32"], flag_values=_flags.flags.FlagValues())


def test_contexts_of_a_card_with_yarn(tmp_path):
  """The file says 16 positions, and its scaling 16 times four: so many are accepted, and not one more."""
  folder, _ = hf_toy.make_folder(tmp_path / "model", TIED)
  card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
  path = hf_toy.change_folder(folder, fields={"max_position_embeddings": 16, "rope_scaling": card})
  argv = ["train", "--config=tests/toys/training_toy.py", f"--config.model.checkpoint={path}"]
  parse = lambda context: _flags.parse(
    [
      *argv,
      f"--workdir={tmp_path}",
      f"--config.sampler.context_length={context}",
      "--config.rollout.row_lengths=32,128",
    ],
    flag_values=_flags.flags.FlagValues(),
  )
  validate(parse(64)[0], training=True)
  with pytest.raises(ConfigError, match="65 tokens, the model is meant for 64"):
    validate(parse(65)[0], training=True)


@dataclasses.dataclass(frozen=True)
class Chat:
  """Settings of an environment that takes its tokenizer from a folder, and of one around it."""

  tokenizer_folder: str = MODEL_CHECKPOINT
  inner: training_toy.Parity | Chat = training_toy.Parity()


@pytest.mark.parametrize("environment", [Chat(), Chat("elsewhere", Chat())])
def test_an_environment_takes_the_tokenizer_from_the_same_folder(folder, tmp_path, environment):
  config = dataclasses.replace(training_toy.get_config(), environment=environment)
  with pytest.raises(ConfigError, match="model.checkpoint: it is empty, and environment.*tokenizer_folder takes"):
    with_folder_shape(config)
  with pytest.raises(ConfigError, match=f"{tmp_path} is no Hugging Face folder, and"):
    with_folder_shape(training_toy.replace(config, model={"checkpoint": str(tmp_path)}))
  source = str(folder[0].path)
  shaped = with_folder_shape(training_toy.replace(config, model={"checkpoint": source}))
  assert shaped.environment in (Chat(source), Chat("elsewhere", Chat(source)))
  assert (shaped.environment.tokenizer_folder == source) == (environment == Chat())


TAKERS = {
  "model.checkpoint": HFFolder,
  "model.checkpoint of checkpoints": load_params,
  "tokenizer": HFTokenizer,
  "--base": lambda name: convert.to_hf("runs/a", "models/out", base=name),
  "model.checkpoint: .*takes the tokenizer": lambda name: with_folder_shape(
    training_toy.replace(dataclasses.replace(training_toy.get_config(), environment=Chat()), model={"checkpoint": name})
  ),
}


@pytest.mark.parametrize("field", TAKERS)
def test_who_takes_a_folder_says_how_to_get_that_of_a_name_on_the_hub(tmp_path, monkeypatch, field):
  monkeypatch.chdir(tmp_path)
  words = "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B"
  with pytest.raises(ConfigError, match=f"(?s)^{field.removesuffix(' of checkpoints')}.*{words}"):
    TAKERS[field]("Qwen/Qwen3-0.6B")


def test_without_a_run_its_policy_is_the_newest(folder, tmp_path):
  """What evaluate and sample look at: the folder's policy, until there is a checkpoint, or when it is asked for."""
  source, params = folder
  config = training_toy.replace(training_toy.get_config(), model={"checkpoint": str(source.path)})
  learner = setup.make_learner(with_folder_shape(config), tuple(jax.devices()[:1]))
  newest, version, phase, _ = phases.latest_policy(learner.config, learner, tmp_path)
  equal(newest, params)
  assert (version, phase) == (0, "base")
  with pytest.raises(ConfigError, match="holds no checkpoint of train"):
    phases.latest_policy(learner.config, learner, tmp_path, "train")
  imitated = jax.tree.map(lambda leaf: leaf + 1, params)
  with Checkpointer(tmp_path / "sft") as checkpointer:
    checkpointer.save(3, {"policy": {"params": imitated}})
  newest, _, phase, checkpoint = phases.latest_policy(learner.config, learner, tmp_path)
  equal(newest, imitated)
  assert (phase, checkpoint) == ("sft", str(tmp_path / "sft" / "3"))
  equal(phases.latest_policy(learner.config, learner, tmp_path, "base")[0], params)
  nothing = training_toy.replace(learner.config, model={"checkpoint": ""})
  with pytest.raises(ConfigError, match="model.checkpoint: it names no model"):
    phases.latest_policy(nothing, learner, tmp_path, "base")


def test_a_run_starts_from_it(folder, tmp_path):
  """The policy is the folder's, the critic its trunk with a head by configuration."""
  source, params = folder
  config = training_toy.replace(
    training_toy.get_config(),
    model={"checkpoint": str(source.path)},
    algorithm={"value_head_initializer": "normal"},
    mesh={"fsdp": 2, "data": 1, "tensor": 1},
  )
  with pytest.raises(ConfigError, match="with_folder_shape"):
    phases.initial_policy(config, setup.make_learner(config, tuple(jax.devices()[:2])), tmp_path, [])
  config = with_folder_shape(config)
  learner = setup.make_learner(config, tuple(jax.devices()[:2]))
  state = phases.initial_state(config, learner, tmp_path, phases.reinforcement_learning(config))
  equal(state.policy.params, params)
  critic = dict(state.critic.params)
  head = np.asarray(critic.pop("value_head"))
  equal(critic, {name: leaf for name, leaf in params.items() if name != "head"})
  assert 0.3 * config.model.initializer_range < head.std() < 3 * config.model.initializer_range


def test_there_and_back(folder, tmp_path):
  """Folder to checkpoints to folder: the same bytes and files; the checkpoints give a run the shape, too."""
  source, params = folder
  convert.to_checkpoint(source.path, tmp_path / "checkpoint")
  equal(load_params(tmp_path / "checkpoint"), params)
  config = training_toy.replace(training_toy.get_config(), model={"checkpoint": str(tmp_path / "checkpoint")})
  assert with_folder_shape(config).model.d_model == TIED.d_model
  convert.to_hf(tmp_path / "checkpoint", tmp_path / "back")
  names = {path.name for path in source.path.iterdir()}
  assert names == {path.name for path in (tmp_path / "back").iterdir()}
  for name in names - {"config.json"}:
    assert (source.path / name).read_bytes() == (tmp_path / "back" / name).read_bytes(), name
  assert HFFolder(tmp_path / "back").fields == source.fields
  with pytest.raises(ConfigError, match="is not empty"):
    convert.to_checkpoint(source.path, tmp_path / "checkpoint")


def test_bf16_stays_bf16(folder, tmp_path):
  convert.to_checkpoint(folder[0].path, tmp_path / "checkpoint", dtype="bfloat16")
  convert.to_hf(tmp_path / "checkpoint", tmp_path / "back")
  assert {tensor.dtype for tensor in HFFolder(tmp_path / "back").tensors.values()} == {"BF16"}


def test_both_networks_of_a_run_of_our_own(tmp_path, caplog):
  """A model that was trained from nothing: its shape is that of the run's recorded configuration."""
  config = training_toy.replace(training_toy.get_config(), algorithm={"critic_reads_logprobs": True})
  learner = setup.make_learner(config, tuple(jax.devices()[:1]))
  state = phases.initial_state(config, learner, tmp_path, phases.reinforcement_learning(config))
  with Checkpointer(tmp_path / "train") as checkpointer:
    checkpointer.save(7, state)
  with pytest.raises(ConfigError, match="nothing tells the model's shape"):
    convert.to_hf(tmp_path / "train", tmp_path / "policy")
  write_config(config, tmp_path)
  convert.to_hf(tmp_path / "train", tmp_path / "policy")
  convert.to_hf(tmp_path / "train", tmp_path / "critic", network="critic")
  policy, critic = HFFolder(tmp_path / "policy"), HFFolder(tmp_path / "critic")
  assert policy.fields["model_type"] == "qwen3_moe" and policy.fields["num_experts"] == 2
  assert policy.tensors.keys() - critic.tensors.keys() == {"lm_head.weight"}
  heads = read_header(critic.path / "value_head.safetensors")
  assert heads.keys() == {"value_head.weight", "logprob_embed.weight"}
  recorded = json.loads((tmp_path / "config.json").read_text())
  recorded["model"]["checkpoint"] = "models/gone"
  (tmp_path / "config.json").write_text(json.dumps(recorded))
  convert.to_hf(tmp_path / "train", tmp_path / "without_base")  # the folder is gone, but the shape is known
  assert "models/gone is not there" in caplog.text
  recorded["model"] |= {"checkpoint": "", "num_layers": 2}
  (tmp_path / "config.json").write_text(json.dumps(recorded))
  with pytest.raises(ConfigError, match=r"checkpoint policy/moe_layers/attention/k: expected float32\[2, "):
    convert.to_hf(tmp_path / "train", tmp_path / "other")
