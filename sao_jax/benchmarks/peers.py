"""What other frameworks reached at the full scale's shapes, in fp32 on a 2-core CPU; measured once, for orientation.

Tokens per second. tunix is version 0.1.7; "torch" is PyTorch with transformers (the dense model compiled). The train
step is one policy plus one critic update on [64 rows, 128 tokens], all parameters training.
"""

from __future__ import annotations

TUNIX_USEFUL_SAMPLING = 1.6e3  # tokens that were asked for; its sampler waits for the longest answer of a batch
TUNIX_PADDED_SAMPLING = 5.1e3  # all tokens that it decoded
DENSE_TRAINING = {"tunix": 4.2e3, "torch": 9.5e3}
MOE_TRAINING = {"tunix": 2.2e3, "torch": 6.9e3}
