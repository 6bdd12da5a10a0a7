"""Fields of a config.json that change nothing of what a model computes from token ids, whatever the family."""

from __future__ import annotations

# Names, versions, tools, and where code or tokenizer lie.
_PROVENANCE = (
  *("architectures", "model_type", "transformers_version", "auto_map", "name_or_path", "_name_or_path"),
  *("_commit_hash", "custom_pipelines", "unsloth_version", "unsloth_fixed", "tokenizer_class", "prefix"),
)

# Number formats and implementations. The import decides on dtypes, and reads quantization_config by itself.
_IMPLEMENTATION = (
  *("dtype", "torch_dtype", "quantization_config", "attn_implementation", "_attn_implementation"),
  *("_attn_implementation_autoset", "experts_implementation", "_experts_implementation", "use_cache"),
  *("chunk_size_feed_forward", "torchscript", "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing"),
)

# What a call returns, training losses of others, and heads of classifiers.
_CALLS = (
  *("return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "router_aux_loss_coef"),
  "tie_last_hidden_states",
  *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
)

# Encoders beside the decoder, which these families do not have.
_ENCODERS = (
  *("is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads"),
  "decoder_start_token_id",
)

# Tokens with a role: chat/stop_tokens.py reads those that end a turn.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id")

# Settings of generation, which old files hold and transformers drops.
_GENERATION = (
  *("assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens"),
  *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "epsilon_cutoff"),
  *("encoder_repetition_penalty", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id"),
  *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
  *("num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams"),
  *("num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty"),
  *("return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p"),
)

IGNORED = _PROVENANCE + _IMPLEMENTATION + _CALLS + _ENCODERS + _TOKENS + _GENERATION
