"""Chat: the tokenizer and template of a Hugging Face folder, and conversations that grow turn by turn as token ids.

Messages go in; token ids come out, with a mask of the sampled ones. Sampled ids are kept as they are and never
tokenised again. The room needs the extra `hf`, and never imports jax.
"""
