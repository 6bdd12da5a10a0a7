"""The configuration of a run: frozen dataclasses, one per room, with the paper's defaults (arXiv 2607.07508).

Everything here is static data: values only, no functions of a run. `sao_jax.configuration.relations`, called before any
work starts, refuses combinations that cannot work.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MODEL_CHECKPOINT = "model.checkpoint"  # as a `tokenizer_folder` of an environment: the folder that this field names


@dataclasses.dataclass(frozen=True)
class YarnConfig:
  """YaRN (arXiv 2309.00071): rotary frequencies stretched for contexts beyond those of pretraining."""

  factor: float = 1.0  # by which positions are stretched; 1: off
  original_positions: int = 32_768  # of pretraining
  beta_fast: float = 32.0  # frequencies that turn more often than this within those positions stay
  beta_slow: float = 1.0  # those that turn less often are divided by the factor; between, both are mixed
  attention_factor: float = 0.0  # on cos and sin; 0: 0.1 ln(factor) + 1
  truncate: bool = True  # the bounds of the mix are whole dimensions


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """LoRA (arXiv 2106.09685): the policy trains a low-rank update of its matrices, W + alpha / rank · A B, and no W."""

  rank: int = 0  # 0: off, everything trains
  alpha: float = 16.0
  targets: tuple[str, ...] = ("attention", "mlp")  # mlp: feed-forward layers, experts and shared experts


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a decoder-only transformer; the value network shares it (with a scalar head).

  `num_experts=0` makes every feed-forward dense. With experts, the first `num_dense_layers` layers stay dense.
  """

  vocab_size: int = 272
  num_layers: int = 2
  d_model: int = 64
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 16
  d_ff: int = 128  # width of dense feed-forward layers
  num_experts: int = 0
  num_experts_per_token: int = 2
  d_ff_expert: int = 64
  d_ff_shared: int = 0  # width of the shared expert, 0: none
  num_dense_layers: int = 0
  renormalize_router: bool = True  # top-k router weights sum to one
  router: str = "softmax"  # softmax | sigmoid: scores of experts; sigmoid chooses by score plus a correction bias
  num_expert_groups: int = 1  # sigmoid only: experts in equal groups, of which a token may use the best few
  num_groups_per_token: int = 1
  routed_scaling: float = 1.0  # sigmoid only: factor on the weights of the chosen experts
  qk_norm: bool = True
  attention_bias: bool = False  # of queries, keys and values
  kv_lora_rank: int = 0  # width of a token's compressed keys and values: above 0, attention is latent (MLA)
  q_lora_rank: int = 0  # of compressed queries; latent attention only, as the next three, which replace head_dim
  qk_nope_head_dim: int = 0  # of queries and keys: the part that is not rotated
  qk_rope_head_dim: int = 0  # and the part that is, one for the keys of all heads
  v_head_dim: int = 0
  index_topk: int = 0  # positions that a query may read, chosen by the indexer (DSA); 0: all; latent attention only
  index_num_heads: int = 0
  index_head_dim: int = 0
  indexer_types: tuple[str, ...] = ()  # full | shared for every layer: shared ones read what the last full one chose
  tie_embeddings: bool = False
  rope_theta: float = 10_000.0
  rotary_fraction: float = 1.0  # of the head dimensions: the first ones are rotated, the rest is not
  yarn: YarnConfig = YarnConfig()
  max_positions: int = 32_768  # the longest context that the model is meant for
  rms_norm_eps: float = 1e-6
  initializer_range: float = 0.02
  dtype: str = "float32"  # of activations and matmuls; norms, router, softmax and log-probs are always fp32
  param_dtype: str = "float32"
  remat: str = "none"  # none | full | dots: what the backward pass recomputes
  moe_implementation: str = "auto"  # auto | blocked | megablox | ragged_dot
  lora: LoRAConfig = LoRAConfig()  # of the policy; the critic trains in full (see algorithm.freeze_attention)
  checkpoint: str = ""  # checkpoints of a run, or a Hugging Face folder, to start from; empty: random initialisation

  @property
  def is_latent(self) -> bool:
    """Attention reads compressed keys and values (MLA), in place of grouped ones."""
    return self.kv_lora_rank > 0

  @property
  def rotary_dim(self) -> int:
    """Dimensions of queries and keys, per head, that rotary embeddings turn."""
    return self.qk_rope_head_dim or int(self.head_dim * self.rotary_fraction)

  @property
  def has_indexer(self) -> tuple[bool, ...]:
    """For every layer: it has an indexer of its own, instead of reading what an earlier layer chose."""
    if not self.index_topk:
      return (False,) * self.num_layers
    return tuple(kind == "full" for kind in self.indexer_types) or (True,) * self.num_layers

  @property
  def num_mlp_layers(self) -> int:
    """Layers with a dense feed-forward part: the first ones, or all."""
    return self.num_dense_layers if self.num_experts else self.num_layers

  @property
  def num_moe_layers(self) -> int:
    """Layers with experts: those behind the dense ones."""
    return self.num_layers - self.num_mlp_layers

  @property
  def routed_shape(self) -> tuple[int, int]:
    """(L, k): the layers with experts, and the experts that a token uses in each of them."""
    return self.num_moe_layers, self.num_experts_per_token


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
  """SAO (arXiv 2607.07508): DIS policy loss, skip-observation GAE, K critic updates."""

  advantage: str = "sao"  # sao: skip-observation GAE with a critic | grpo: group-relative, no critic
  epsilon_low: float = 0.3  # deltas, not bounds: keep 1 - epsilon_low < ratio < 1 + epsilon_high
  epsilon_high: float = 5.0
  gamma: float = 1.0
  alpha: float = 1.5  # policy lambda = 1 - 1 / (alpha * n), n sampled tokens
  critic_lambda: float = 1.0
  value_updates: int = 2  # K
  advantage_values: str = "post"  # post: values read after the K critic updates | pre: before
  truncation: str = "zero"  # zero | bootstrap | mask: what follows a trajectory that was cut
  whiten_advantages: bool = True
  freeze_attention: bool = True  # of the critic, during RL
  freeze_router: bool = False
  freeze_embeddings: bool = False
  value_clip: float = 0.0  # PPO value clip range, 0: off
  value_head: str = "scalar"  # scalar | hl_gauss
  value_head_initializer: str = "zeros"  # zeros: V = 0 | normal: N(0, model.initializer_range)
  value_bins: int = 51  # hl_gauss only
  value_min: float = 0.0
  value_max: float = 1.0
  critic_warmup_steps: int = 10  # critic-only steps at the start of RL
  router_replay: bool = False  # the policy trains with the experts that the sampler used (R3, arXiv 2510.11370)
  router_bias_update: float = 0.0  # change of the sigmoid router's correction bias per step, towards an even load
  micro_batches: int = 1
  logprob_chunk: int = 1024  # tokens per block of the head; [rows, T, V] is never built


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with global-norm clipping and linear warm-up to a constant learning rate."""

  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.98
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  warmup_steps: int = 0


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """The continuous-batching engine."""

  num_slots: int = 32
  context_length: int = 256  # tokens of KV cache per slot
  decode_steps: int = 8  # decode steps per dispatch, at most
  decode_batch: int = 32  # slots per dispatch; on accelerators all of them, on a CPU a few are faster (caches)
  prefill_buckets: tuple[int, ...] = (16, 64, 256)  # padded lengths of a prefill
  prefill_batch: int = 8  # sequences per prefill call
  window_buckets: tuple[int, ...] = ()  # attended cache lengths that decode compiles for; empty: powers of two
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  kv_after_publish: str = "keep"  # keep | reprefill
  cache_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """The asynchronous loop: admission, episodes, staleness, packing, placement."""

  batch_size: int = 128  # trajectories per train step
  group_size: int = 1  # rollouts of each prompt; 1 is single-rollout
  admission_staleness: int = 4  # eta: in flight + buffered + in training <= (eta + 1) * batch_size; 0 is synchronous
  max_staleness: int = 4  # tau, in policy versions, measured on the oldest sampled token at consumption; -1: no bound
  staleness: str = "drop"  # drop | mask: what happens to a trajectory (its over-age tokens) beyond tau
  max_turns: int = 50
  max_tokens: int = 131_072  # sampled tokens per episode, which must also fit into contexts and rows
  max_tokens_per_turn: int = 64
  environment_timeout: float = 30.0  # seconds for one reset or step
  environment_retries: int = 2
  max_consecutive_failures: int = 20  # of the environment, before the run stops with its name
  row_lengths: tuple[int, ...] = (128, 256)  # packed row lengths T; the smallest that holds the longest trajectory
  row_counts: tuple[int, ...] = (32, 64, 128)  # numbers of packed rows B
  max_in_flight: int = 0  # episodes at the same time; 0: the sampler's slots. Beyond them, idle ones are parked
  deterministic: bool = False  # rollouts in rounds, each under one version: a run that can be repeated bit for bit
  record: bool = False  # keep what every train step consumed, for launch.replay; deterministic runs always do
  placement: str = "shared"  # shared | split
  sampler_devices: int = 0  # split only: how many local devices sample


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the learner's mesh axes; one of them may be -1 (what is left)."""

  data: int = 1
  fsdp: int = -1
  expert: int = 1
  tensor: int = 1
  context: int = 1


@dataclasses.dataclass(frozen=True)
class SFTConfig:
  """Imitation cold start on demonstrations that the environment produces."""

  steps: int = 1000
  batch_size: int = 64  # demonstrations per step
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-3, weight_decay=0.0, warmup_steps=50)


@dataclasses.dataclass(frozen=True)
class ValuePretrainingConfig:
  """Critic-only steps on rollouts of the frozen initial policy, until explained variance plateaus."""

  min_steps: int = 50
  max_steps: int = 500
  plateau_window: int = 20  # it has plateaued once the mean explained variance of the last so many steps ...
  plateau_gain: float = 0.01  # ... exceeds that of as many before by less than this
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6, clip_norm=10.0)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Held-out success, all on one policy version."""

  every: int = 0  # policy versions between evaluations during training, first and last included; 0: none
  prompts: int = 500
  temperature: float = 1.0
  seed: int = 20_260_729  # of the held-out prompts; not one that anybody trains with
  confidence: float = 0.95


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """The loop around the train step."""

  steps: int = 1000  # policy updates
  seed: int = 0
  checkpoint_every: int = 100  # train steps
  keep_checkpoints: int = 2
  log_every: int = 1
  audit: bool = True  # compare sampler and learner log-probs before the first step
  audit_tolerance: float = 1e-4  # max |delta log-prob|; raise it for bf16
  watchdog_seconds: float = 600.0  # silence of the rollout side after which the run stops


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """One run. `environment` is any frozen dataclass with `make(tokenizer)`, see sao_jax.environments.base."""

  environment: Any
  name: str = "run"
  model: ModelConfig = ModelConfig()
  algorithm: AlgorithmConfig = AlgorithmConfig()
  policy_optimizer: OptimizerConfig = OptimizerConfig()
  critic_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6, clip_norm=10.0, warmup_steps=10)
  sampler: SamplerConfig = SamplerConfig()
  rollout: RolloutConfig = RolloutConfig()
  mesh: MeshConfig = MeshConfig()
  sft: SFTConfig = SFTConfig()
  value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  training: TrainingConfig = TrainingConfig()
