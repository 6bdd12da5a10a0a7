"""Makes a tiny Qwen3-MoE with random weights, tokenizer and chat template, saved by transformers, to try things out.

python -m launch.tiny_checkpoint --output=models/tiny
"""

from __future__ import annotations

from absl import flags, logging

from launch import _flags
from sao_jax.configuration.output_folder import whole_folder
from sao_jax.environments.answers import INSTRUCTION
from sao_jax.errors import ConfigError

_OUTPUT = flags.DEFINE_string("output", None, "Folder to write; it must be new.", required=True)

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
WORDS = (INSTRUCTION, "State the final answer to the following arithmetic problem: 4 + 3 =", "system user assistant")


def main() -> None:
  """Writes the folder, whole or not at all."""
  output = _OUTPUT.value
  _flags.check_output(output)
  try:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
  except ImportError as error:
    raise ConfigError("launch.tiny_checkpoint", f"{error}.", 'Run: pip install -e ".[parity]"') from error

  # A byte-level tokenizer that knows the words of the arithmetic task, so that its prompts become short.
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  alphabet, names = pre_tokenizers.ByteLevel.alphabet(), [PAD, START, END]
  trainer = trainers.BpeTrainer(vocab_size=384, initial_alphabet=alphabet, special_tokens=names, show_progress=False)
  tokenizer.train_from_iterator(WORDS, trainer)
  fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
  fast.chat_template = CHATML

  # A small model that has all parts of a real one: two layers, four experts, grouped queries.
  torch.manual_seed(0)
  config = transformers.Qwen3MoeConfig(
    vocab_size=len(fast), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, max_position_embeddings=1024,
    norm_topk_prob=True, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
  )  # fmt: skip
  model = transformers.Qwen3MoeForCausalLM(config)

  with whole_folder(output, last="config.json") as folder:
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
  logging.info("Wrote %s: %d parameters, %d tokens.", output, model.num_parameters(), len(fast))


if __name__ == "__main__":
  _flags.run_tool(main, example="--output=models/tiny")
