"""google-tunix's sampler on requests of uneven lengths, wave by wave: it waits for the longest answer of a batch.

Runs in the peers' Python; see `sao_jax.benchmarks.peers`.
"""

import json
import sys

import jax
import numpy as np
from flax import nnx
from serving import serve
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3

PAD = 0


class Ids:
  """A tokenizer of texts that are token ids in decimal."""

  def encode(self, text, **unused):
    return [int(word) for word in text.split()]

  def decode(self, ids, **unused):
    return " ".join(map(str, ids))

  def bos_id(self):
    return 0

  def eos_id(self):
    return -1  # never sampled: only the budget ends an answer

  def pad_id(self):
    return PAD

  def dedup_bos_ids(self, ids):
    return ids


def make_model(config, seed=0):
  """A random Qwen3, dense or with experts."""
  moe = config["num_experts"] > 0
  shape = qwen3.ModelConfig(
    num_layers=config["num_hidden_layers"],
    vocab_size=config["vocab_size"],
    embed_dim=config["hidden_size"],
    hidden_dim=config["moe_intermediate_size" if moe else "intermediate_size"],
    num_heads=config["num_attention_heads"],
    head_dim=config["head_dim"],
    num_kv_heads=config["num_key_value_heads"],
    rope_theta=config["rope_theta"],
    norm_eps=config["rms_norm_eps"],
    num_experts=config["num_experts"] or None,
    num_experts_per_tok=config["num_experts_per_tok"] if moe else None,
  )
  return qwen3.Qwen3(shape, rngs=nnx.Rngs(seed))


def main():
  task = json.loads(sys.argv[1])
  config = task["model"]
  cache = CacheConfig(
    cache_size=task["longest_prompt"] + task["longest_answer"],
    num_layers=config["num_hidden_layers"],
    num_kv_heads=config["num_key_value_heads"],
    head_dim=config["head_dim"],
  )
  sampler = Sampler(make_model(config), Ids(), cache)
  rng = np.random.default_rng(1)
  waves = []
  for wave in task["waves"]:
    prompts = [" ".join(map(str, rng.integers(PAD + 1, config["vocab_size"], length))) for length, _ in wave]
    waves.append((prompts, max(answer for _, answer in wave)))

  def run():
    for prompts, steps in waves:
      out = sampler(
        prompts,
        max_generation_steps=steps,
        max_prompt_length=task["longest_prompt"],
        return_logprobs=True,
        eos_tokens=[-1],
        temperature=1.0,
        top_p=1.0,
        seed=0,
      )
      assert len(out.tokens) == len(prompts) and len(out.tokens[0]) == steps
      jax.block_until_ready(out.tokens)

  serve(run)


if __name__ == "__main__":
  main()
