"""What other frameworks reached at the full scale's shapes, in fp32 on a 2-core CPU; measured once, for orientation.

Tokens per second. tunix is version 0.1.7; "torch" is PyTorch with transformers (dense: compiled). The train step is one
policy plus one critic update on [64 rows, 128 tokens], all parameters training.
"""

from __future__ import annotations

TUNIX_USEFUL_SAMPLING = (
  1.6e3  # its own sampler, which waits for the longest answer of a batch: tokens that were asked for
)
TUNIX_PADDED_SAMPLING = 5.1e3  # ... and all that it decoded
TRAINING = {
  "dense": {"tunix": 4.2e3, "torch": 9.5e3},
  "moe": {"tunix": 2.2e3, "torch": 6.9e3},
}
