"""The kinds of attention, one file each, and the choice between them.

Enters: normalised hidden states, rotary angles and an `attend`, which says what a token's queries may read. Leaves: the
layer's output. `kind` says what another kind must bring along; it is then listed here, and its cache in
`sampler.caches`.
"""

from sao_jax.config import ModelConfig
from sao_jax.models.attention.grouped import GROUPED
from sao_jax.models.attention.kind import Attend, AttentionKind
from sao_jax.models.attention.latent import LATENT

__all__ = ["KINDS", "Attend", "AttentionKind", "attention_kind"]

KINDS = (GROUPED, LATENT)


def attention_kind(config: ModelConfig) -> AttentionKind:
  """Returns the kind of attention of a model."""
  return LATENT if config.is_latent else GROUPED
