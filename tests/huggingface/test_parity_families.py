"""Every family against transformers: logits, routing, greedy sampling, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
from toys import parity

from sao_jax.config import ModelConfig
from sao_jax.huggingface.families import family_of_model
from sao_jax.huggingface.folder import HFFolder
from sao_jax.huggingface.load import import_policy
from sao_jax.huggingface.published import PUBLISHED, total_params
from sao_jax.huggingface.save import export_policy

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
CASES = {
  "qwen3": ("Qwen3Config", COMMON | {"tie_word_embeddings": True}),
  "qwen3 with YaRN": ("Qwen3Config", COMMON | {"rope_parameters": YARN}),
  "qwen3_moe": ("Qwen3MoeConfig", COMMON | EXPERTS),
  "glm4_moe as GLM-4.5": ("Glm4MoeConfig", GLM | {"use_qk_norm": True, "routed_scaling_factor": 2.5}),
  "glm_moe_dsa as GLM-5": ("GlmMoeDsaConfig", DSA),
  "glm_moe_dsa as GLM-5.2": ("GlmMoeDsaConfig", DSA | {"index_topk_freq": 2, "num_hidden_layers": 4}),
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
    assert parity.max_difference(logits[row, part], pair.logits_of(ids[row, part])) <= 2e-4


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
    assert parity.max_difference(logits[row, part], expected[row, part]) <= 2e-4


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
  """64 tokens as `generate` finds them; and the sampler's log-probs are the learner's."""
  import torch

  prompts = [parity.random_ids(parity.PROMPT, seed=seed).tolist() for seed in (3, 4)]
  for prompt, completion in zip(prompts, pair.generate(prompts, temperature=0.0), strict=True):
    ids = torch.as_tensor([prompt])
    expected = pair.theirs.generate(ids, max_new_tokens=parity.NEW, do_sample=False, attention_mask=ids * 0 + 1)
    np.testing.assert_array_equal(completion.token_ids, expected[0, len(prompt) :].numpy())
    assert len(set(completion.token_ids.tolist())) > 3


def test_sampler_and_learner_agree(pair):
  prompts = [parity.random_ids(parity.PROMPT, seed=seed).tolist() for seed in (5, 6)]
  for prompt, completion in zip(prompts, pair.generate(prompts, temperature=1.0), strict=True):
    _, logprobs = pair.forward(*parity.row_of(np.asarray([*prompt, *completion.token_ids])))
    learned = logprobs[0, len(prompt) : len(prompt) + parity.NEW]
    assert parity.max_difference(completion.logprobs, learned) <= 1e-4


@pytest.mark.parametrize("with_base", [True, False])
def test_the_export_loads_in_transformers(pair, tmp_path, with_base):
  """No missing or unexpected key, the same logits to the last bit, and the same tensors."""
  source = HFFolder(pair.path)
  folder = tmp_path / "exported"
  export_policy(pair.params, pair.config, folder, base=source if with_base else None, shard_bytes=20_000)
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
