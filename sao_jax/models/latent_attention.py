"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token's keys and values are one small vector, its latent of m = R + r numbers: R compressed ones, c, from which every
head derives a key and a value, and a rotary key of r numbers that all heads share. Head h reads the key (c W_h, rotary)
and the value c U_h, where kv_b holds W and U of all heads. Two forms of the same attention:

* expanded, for training: build every head's keys and values, then ordinary attention;
* absorbed, for sampling: since q · (c W_h) = (q W_hᵀ) · c, multiply the query instead and attend over the latents
  themselves, all heads over the same one; U_h follows after the weighted sum. The cache holds latents only.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from sao_jax.config import ModelConfig
from sao_jax.models.linear import linear
from sao_jax.models.norms import rms_norm
from sao_jax.models.rope import apply_interleaved_rope
from sao_jax.parallel.params import Params, ParamSpec, Specs

LATENT_NORM_EPS = 1e-6  # of the two norms in here, whatever rms_norm_eps is, as transformers has it


def latent_specs(config: ModelConfig) -> Specs:
  """The parameters of one layer: queries and key-values, each through a narrow normalised vector, and the output."""
  spec = functools.partial(ParamSpec, dtype=config.param_dtype, stddev=config.initializer_range)
  dim, heads, q_rank, rank = config.d_model, config.num_heads, config.q_lora_rank, config.kv_lora_rank
  plain, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
  norm = lambda width: spec((width,), (None,), "ones", compute_dtype="float32")
  return {
    "q_a": spec((dim, q_rank), ("embed", None)),
    "q_a_norm": norm(q_rank),
    "q_b": spec((q_rank, heads, plain + rotary), ("latent", "heads", None)),
    "kv_a": spec((dim, rank + rotary), ("embed", None)),
    "kv_a_norm": norm(rank),
    "kv_b": spec((rank, heads, plain + value), ("latent", "heads", None)),
    "o": spec((heads, value, dim), ("heads", None, "embed")),
  }


def latent_queries(
  params: Params, x: Float[Array, "B T D"], table: tuple[Array, Array], config: ModelConfig
) -> tuple[Float[Array, "B T H q"], Float[Array, "B T Q"]]:
  """The queries, n plain numbers and r rotated ones per head, and the compressed vector that they come from."""
  compressed = rms_norm(linear(x, params["q_a"]), params["q_a_norm"], LATENT_NORM_EPS)
  plain, rotary = jnp.split(linear(compressed, params["q_b"]), [config.qk_nope_head_dim], axis=-1)
  return jnp.concatenate([plain, apply_interleaved_rope(rotary, table)], axis=-1), compressed


def latent_keys(
  params: Params, x: Float[Array, "B T D"], table: tuple[Array, Array], config: ModelConfig
) -> Float[Array, "B T m"]:
  """The latent of every token: compressed and normalised, then the rotated key."""
  compressed, rotary = jnp.split(linear(x, params["kv_a"]), [config.kv_lora_rank], axis=-1)
  rotary = apply_interleaved_rope(rotary[:, :, None], table)[:, :, 0]
  return jnp.concatenate([rms_norm(compressed, params["kv_a_norm"], LATENT_NORM_EPS), rotary], axis=-1)


def expand(
  latent: Float[Array, "B S m"], kv_b: Float[Array, "R H e"], plain_dim: int
) -> tuple[Float[Array, "B S H q"], Float[Array, "B S H v"]]:
  """Keys and values of every head; `plain_dim` is n."""
  compressed, rotary = jnp.split(latent, [kv_b.shape[0]], axis=-1)
  plain, values = jnp.split(linear(compressed, kv_b), [plain_dim], axis=-1)
  rotary = jnp.broadcast_to(rotary[:, :, None], (*plain.shape[:3], rotary.shape[-1]))
  return jnp.concatenate([plain, rotary], axis=-1), values


def absorb(q: Float[Array, "B T H q"], kv_b: Float[Array, "R H e"], plain_dim: int) -> Float[Array, "B T H m"]:
  """Queries whose product with a latent is that of `q` with the latent's expanded key."""
  plain, rotary = jnp.split(q, [plain_dim], axis=-1)
  weight = kv_b[..., :plain_dim].astype(q.dtype)
  absorbed = jnp.einsum("bthn,rhn->bthr", plain, weight, preferred_element_type=jnp.float32)
  return jnp.concatenate([absorbed.astype(q.dtype), rotary], axis=-1)


def absorbed_values(
  weighted: Float[Array, "B T H R"], kv_b: Float[Array, "R H e"], plain_dim: int
) -> Float[Array, "B T H v"]:
  """The weighted sum of expanded values, from that of the compressed vectors."""
  weight = kv_b[..., plain_dim:].astype(weighted.dtype)
  values = jnp.einsum("bthr,rhv->bthv", weighted, weight, preferred_element_type=jnp.float32)
  return values.astype(weighted.dtype)
