"""Every family against transformers: logits, routing, greedy sampling, and the way back."""

from __future__ import annotations

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest
from toys import hf_toy, parity

from sao_jax.config import ModelConfig, YarnConfig
from sao_jax.huggingface.families import family_of_model
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.published import PUBLISHED, total_params
from sao_jax.huggingface.save import export_policy
from sao_jax.models.attention import attention_kind
from sao_jax.models.attention.latent import score_scale
from sao_jax.models.rope import rope_frequencies, yarn_attention_factor

COMMON = {
  "vocab_size": parity.VOCAB,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id")),
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
GLM = COMMON | {
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "moe_intermediate_size": 16,
  "first_k_dense_replace": 1,
  "attention_bias": True,
}
# Rows are several times longer than the 16 positions that a query reads. With so many heads no two scores are both
# exactly zero, as they are behind the ReLU of a few: which of equal ones torch chooses is its secret.
DSA = {name: value for name, value in GLM.items() if name not in ("attention_bias", "head_dim")} | {
  "num_key_value_heads": 4,
  "kv_lora_rank": 12,
  "q_lora_rank": 20,
  "qk_nope_head_dim": 10,
  "qk_rope_head_dim": 4,
  "v_head_dim": 6,
  "index_topk": 16,
  "index_n_heads": 16,
  "index_head_dim": 9,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Families whose shapes are equal share what is compiled for them.
TWO_LAYERS = COMMON | {"num_hidden_layers": 2}
MLA = {name: value for name, value in GLM.items() if name not in ("attention_bias", "head_dim")} | {
  "num_hidden_layers": 2,
  "num_key_value_heads": 4,
  "kv_lora_rank": 12,
  "q_lora_rank": 20,
  "qk_nope_head_dim": 10,
  "qk_rope_head_dim": 4,
  "v_head_dim": 6,
  "n_group": 4,
  "topk_group": 2,
  "routed_scaling_factor": 2.5,
  "rms_norm_eps": 1e-6,
  "max_position_embeddings": 4096,
  "rope_parameters": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
}
CASES = {
  "qwen3": ("Qwen3Config", COMMON | {"tie_word_embeddings": True}),
  "qwen3 with YaRN": ("Qwen3Config", COMMON | {"rope_parameters": YARN}),
  "qwen3_moe": ("Qwen3MoeConfig", COMMON | EXPERTS),
  "glm4_moe as GLM-4.5": ("Glm4MoeConfig", GLM | {"use_qk_norm": True, "routed_scaling_factor": 2.5}),
  "glm_moe_dsa as GLM-5": ("GlmMoeDsaConfig", DSA),
  "glm_moe_dsa as GLM-5.2": ("GlmMoeDsaConfig", DSA | {"index_topk_freq": 2, "num_hidden_layers": 4}),
  "qwen2": ("Qwen2Config", TWO_LAYERS | {"max_position_embeddings": 4096}),
  "seed_oss": ("SeedOssConfig", TWO_LAYERS | {"max_position_embeddings": 4096}),
  "seed_oss with biases of the output": (
    "SeedOssConfig",
    TWO_LAYERS | {"attention_out_bias": True, "max_position_embeddings": 2048, "rope_parameters": LLAMA3},
  ),
  "llama with biases": ("LlamaConfig", TWO_LAYERS | {"attention_bias": True, "rope_parameters": LLAMA3}),
  "llama as 3.1": ("LlamaConfig", TWO_LAYERS | {"max_position_embeddings": 4096, "rope_parameters": LLAMA3}),
  "mistral": (
    "MistralConfig",
    TWO_LAYERS | {"sliding_window": None, "max_position_embeddings": 4096, "rope_parameters": LLAMA3},
  ),
  "deepseek_v3": ("DeepseekV3Config", MLA),
  "glm4_moe_lite as GLM-4.7-Flash": ("Glm4MoeLiteConfig", MLA),
  "glm4_moe in groups": ("Glm4MoeConfig", GLM | {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
  name, fields = CASES[request.param]
  package = parity.transformers()
  return parity.load_pair(getattr(package, name)(**fields), tmp_path_factory.mktemp("hf") / "model")


@pytest.mark.parametrize("batch", [parity.padded_batch, parity.packed_batch])
def test_logits(pair, batch):
  """Of every real token; packed segments are as if each were alone."""
  ids, segments = batch()
  logits, _ = pair.forward(ids, segments)
  for row, part in parity.segments_of(ids, segments):
    assert parity.max_difference(logits[row, part], pair.logits_of(ids[row, part])) <= 1e-4


def test_rows_that_are_padded_on_the_left(pair):
  """transformers counts positions by the attention mask, [0,0,1,1,1] -> [0,0,0,1,2], and finds the logits of ours."""
  import torch

  positions_of = lambda attention: pair.theirs._prepare_position_ids_for_generation(
    attention, {"attention_mask": attention}
  )
  assert positions_of(torch.tensor([[0, 0, 1, 1, 1]])).tolist() == [[0, 0, 0, 1, 2]]
  ids, segments = parity.random_ids(*parity.SHAPE, seed=8), np.ones(parity.SHAPE, np.int32)
  segments[0, :3], segments[1, :41] = 0, 0
  logits, _ = pair.forward(ids, segments)
  attention = torch.as_tensor(segments).long()
  with torch.no_grad():
    expected = pair.theirs(
      torch.as_tensor(ids).long(), attention_mask=attention, position_ids=positions_of(attention)
    ).logits.numpy()
  for row, part in parity.segments_of(ids, segments):
    assert parity.max_difference(logits[row, part], expected[row, part]) <= 1e-4


def test_router_decisions(pair):
  """The same experts for every token in every layer."""
  gates = [module for name, module in pair.theirs.named_modules() if name.endswith("mlp.gate")]
  assert len(gates) == (pair.config.num_layers - pair.config.num_dense_layers if pair.config.num_experts else 0)
  chosen = []
  hooks = [gate.register_forward_hook(lambda _, inputs, outputs: chosen.append(outputs[2].numpy())) for gate in gates]
  ids, segments = parity.row_of(parity.random_ids(60, seed=2))
  pair.logits_of(ids[0, :60])
  for hook in hooks:
    hook.remove()
  pair.forward(ids, segments)
  assert len(chosen) == len(pair.experts) == len(gates)
  for theirs, ours in zip(chosen, pair.experts, strict=True):
    np.testing.assert_array_equal(np.sort(theirs, axis=-1), np.sort(ours[0, :60], axis=-1))
    assert len(np.unique(theirs)) > 4  # the router does route


def test_greedy_sampling(pair):
  """64 tokens in two turns as `generate` finds them."""
  import torch

  new = lambda length, seed: parity.random_ids(length, seed=seed).tolist()
  sessions = [[(new(parity.PROMPT, seed), 40), (new(5, seed + 10), parity.NEW - 40)] for seed in (3, 4)]
  for turns, completions in zip(sessions, pair.generate(sessions, temperature=0.0), strict=True):
    context, sampled = [], []
    for (tokens, length), completion in zip(turns, completions, strict=True):
      ids = torch.as_tensor([context + tokens])
      expected = pair.theirs.generate(ids, max_new_tokens=length, do_sample=False, attention_mask=ids * 0 + 1)
      np.testing.assert_array_equal(completion.token_ids, expected[0, ids.shape[1] :].numpy())
      context, sampled = expected[0].tolist(), sampled + completion.token_ids.tolist()
    assert len(sampled) == parity.NEW and len(set(sampled)) > 3


def test_sampler_and_learner_agree(pair):
  prompts = [parity.random_ids(parity.PROMPT, seed=seed).tolist() for seed in (5, 6)]
  sessions = [[(prompt, parity.NEW)] for prompt in prompts]
  for prompt, (completion,) in zip(prompts, pair.generate(sessions, temperature=1.0), strict=True):
    _, logprobs = pair.forward(*parity.row_of(np.asarray([*prompt, *completion.token_ids])))
    learned = logprobs[0, len(prompt) : len(prompt) + parity.NEW]
    assert parity.max_difference(completion.logprobs, learned) <= 1e-4


@pytest.mark.parametrize("with_base", [True, False])
def test_the_export_loads_in_transformers(pair, tmp_path, with_base):
  """No missing or unexpected key, the same logits to the last bit, and the same tensors.

  Without a base the family writes config.json, also where another one that could comes first.
  """
  source = HFFolder(pair.path)
  folder = tmp_path / "exported"
  export_policy(pair.params, pair.config, folder, base=source if with_base else None, shard_bytes=20_000)
  if not with_base:
    written = source.family.write(pair.config) | {"model_type": source.family.model_type}
    (folder / "config.json").write_text(json.dumps(written | {"architectures": [source.family.architecture]}))
  model, info = parity.transformers().AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation="eager", output_loading_info=True
  )
  assert not any(info.values()), info
  ids = parity.random_ids(40, seed=7)
  np.testing.assert_array_equal(pair.logits_of(ids), pair.logits_of(ids, model))
  exported = HFFolder(folder)
  assert exported.tensors.keys() == source.tensors.keys()
  assert exported.model_config() == source.model_config()
  assert len(list(folder.glob("*.safetensors"))) > 1
  for name in source.tensors:
    assert exported.read(name).tobytes() == source.read(name).tobytes(), name


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "glm4_moe as GLM-4.5", "glm_moe_dsa as GLM-5"])
def test_bf16_folders_come_back_bit_for_bit(case, tmp_path):
  """Saved in bf16 by transformers, which keeps the routers of GLM in fp32; kept in bf16 here, or widened meanwhile."""
  import torch

  package, (name, fields) = parity.transformers(), CASES[case]
  parity.save_random(getattr(package, name)(**fields), tmp_path / "fp32")
  model = package.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
  model.save_pretrained(tmp_path / "bf16")
  source = HFFolder(tmp_path / "bf16")
  gates = {tensor.dtype for name, tensor in source.tensors.items() if name.endswith("mlp.gate.weight")}
  assert gates == ({"F32"} if case.startswith("glm") else {"BF16"} if "moe" in case else set())
  for ours in ("bfloat16", "float32"):
    config = source.model_config(ModelConfig(param_dtype=ours))
    export_policy(import_policy(source.path, config), config, tmp_path / ours, base=source, dtype="bfloat16")
    exported = HFFolder(tmp_path / ours)
    assert exported.tensors.keys() == source.tensors.keys()
    for tensor in source.tensors:
      assert exported.tensors[tensor].dtype == source.tensors[tensor].dtype, tensor
      assert exported.read(tensor).tobytes() == source.read(tensor).tobytes(), tensor


def test_frequencies_in_old_files_are_passed_over(tmp_path):
  """In those of Llama, DeepSeek and others; as in transformers, which finds nothing missing or unexpected."""
  plain = dataclasses.replace(hf_toy.DENSE, qk_norm=False)
  folder, params = hf_toy.make_folder(tmp_path / "a", plain)
  frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones((2,), np.float32) for i in range(2)}
  path = hf_toy.change_folder(folder, tensors=frequencies)
  jax.tree.map(np.testing.assert_array_equal, import_policy(path, plain), params)
  _, info = parity.transformers().AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
  assert not any(info.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
  """The very number of parameters that transformers declares for the config.json that we write."""
  import torch

  package, model = parity.transformers(), PUBLISHED[name].model
  family = family_of_model(model)
  config = package.AutoConfig.for_model(family.model_type, **family.write(model))
  with torch.device("meta"):
    theirs = package.AutoModelForCausalLM.from_config(config)
  corrections = [tensor for name, tensor in theirs.named_buffers() if "correction_bias" in name]
  assert sum(tensor.numel() for tensor in [*theirs.parameters(), *corrections]) == total_params(model)


STRETCHED = [name for name in PUBLISHED if PUBLISHED[name].model.yarn != YarnConfig()]


@pytest.mark.parametrize("name", STRETCHED)
def test_published_rotary_embeddings(name):
  """Frequencies, the factor on cos and sin, and that on the scores, for the config.json that we write."""
  import torch

  package, model = parity.transformers(), PUBLISHED[name].model
  family = family_of_model(model)
  config = package.AutoConfig.for_model(family.model_type, **family.write(model))
  module = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
  rotary = getattr(module, family.architecture.replace("ForCausalLM", "RotaryEmbedding"))(config)
  frequencies = rope_frequencies(attention_kind(model).rotary_dim(model), model.rope_theta, model.yarn)
  np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=1e-6)
  assert yarn_attention_factor(model.yarn) == pytest.approx(rotary.attention_scaling)
  if model.is_latent:
    with torch.device("meta"):
      scale = getattr(module, family.architecture.replace("ForCausalLM", "Attention"))(config, 0).scaling
    assert score_scale(model) == pytest.approx(scale)
