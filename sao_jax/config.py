"""The configuration of a run: frozen dataclasses, one per room, with the paper's defaults (arXiv 2607.07508).

Everything here is static data: values only, no functions of a run. A field says what it may be by itself: names in a
`Literal`, and for numbers an interval in the usual notation: "(0, 1]" is without 0 and with 1. Around a tuple it bounds
the length. How fields relate to each other stands in `sao_jax.configuration.relations`. Both are checked before any
work starts. `python -m launch.train --help` lists all fields with type, bounds, default and the comment behind them.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

PositiveInt = Annotated[int, "[1, inf)"]
NonNegativeInt = Annotated[int, "[0, inf)"]
PositiveFloat = Annotated[float, "(0, inf)"]
NonNegativeFloat = Annotated[float, "[0, inf)"]
Seed = Annotated[int, "[0, 4294967295]"]  # 32 bits: of a larger one jax would read the lowest 32
Sizes = Annotated[tuple[PositiveInt, ...], "[1, inf)"]  # at least one
DType = Literal["float32", "bfloat16"]

MODEL_CHECKPOINT = "model.checkpoint"  # as a `tokenizer_folder` of an environment: the folder that this field names


@dataclasses.dataclass(frozen=True)
class YarnConfig:
  """YaRN (arXiv 2309.00071) and its kin: rotary frequencies stretched for contexts beyond those of pretraining."""

  factor: Annotated[float, "[1, inf)"] = 1.0  # by which positions are stretched; 1: none are
  original_positions: PositiveInt = 32_768  # of pretraining
  beta_fast: PositiveFloat = 32.0  # frequencies that turn more often than this within those positions stay
  beta_slow: PositiveFloat = 1.0  # those that turn less often are divided by the factor; between, both are mixed
  attention_factor: NonNegativeFloat = 0.0  # on cos and sin; 0: 0.1 ln(factor) + 1
  ramp: Literal["dimensions", "turns"] = "dimensions"  # the mix goes by their index, or by their turns (Llama 3.1)
  truncate: bool = True  # the bounds of the mix are whole dimensions; ramp=dimensions only
  mscale_all_dim: NonNegativeFloat = 0.0  # latent only: scores times (0.1 mscale_all_dim ln(factor) + 1)^2


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """LoRA (arXiv 2106.09685): a network trains a low-rank update of its matrices, W + alpha / rank · A B, and no W."""

  rank: NonNegativeInt = 0  # 0: off, everything trains
  alpha: PositiveFloat = 16.0
  targets: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")  # mlp: feed-forward layers and all experts


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a decoder-only transformer; the value network shares it (with a scalar head).

  `num_experts=0` makes every feed-forward dense. With experts, the first `num_dense_layers` layers stay dense.
  """

  vocab_size: PositiveInt = 272
  num_layers: PositiveInt = 2
  d_model: PositiveInt = 64
  num_heads: PositiveInt = 4
  num_kv_heads: PositiveInt = 2
  head_dim: PositiveInt = 16
  d_ff: PositiveInt = 128  # width of dense feed-forward layers
  num_experts: NonNegativeInt = 0
  num_experts_per_token: PositiveInt = 2
  d_ff_expert: PositiveInt = 64
  d_ff_shared: NonNegativeInt = 0  # width of the shared expert, 0: none
  num_dense_layers: NonNegativeInt = 0
  renormalize_router: bool = True  # top-k router weights sum to one
  router: Literal["softmax", "sigmoid"] = "softmax"  # scores of experts; sigmoid chooses by score plus a bias
  num_expert_groups: PositiveInt = 1  # sigmoid only: experts in equal groups, of which a token may use the best few
  num_groups_per_token: PositiveInt = 1
  routed_scaling: PositiveFloat = 1.0  # sigmoid only: factor on the weights of the chosen experts
  qk_norm: bool = True
  attention_bias: bool = False  # of queries, keys and values
  attention_out_bias: bool = False  # of the output projection
  kv_lora_rank: NonNegativeInt = 0  # width of a token's compressed keys and values; above 0, attention is latent (MLA)
  q_lora_rank: NonNegativeInt = 0  # width of the compressed queries; latent attention only, as the next three
  qk_nope_head_dim: NonNegativeInt = 0  # dimensions of queries and keys per head without rotary embedding
  qk_rope_head_dim: NonNegativeInt = 0  # dimensions per head with it; all heads share one rotary key
  v_head_dim: NonNegativeInt = 0  # dimensions of the values per head
  index_topk: NonNegativeInt = 0  # positions that a query may read, chosen by the indexer (DSA); latent only; 0: all
  index_num_heads: NonNegativeInt = 0  # heads of an indexer
  index_head_dim: NonNegativeInt = 0  # dimensions of each of them
  indexer_types: tuple[Literal["full", "shared"], ...] = ()  # per layer; shared: reads what the last full one chose
  tie_embeddings: bool = False
  rope_theta: PositiveFloat = 10_000.0
  rotary_fraction: Annotated[float, "(0, 1]"] = 1.0  # of the head dimensions: the first ones are rotated
  yarn: YarnConfig = YarnConfig()
  max_positions: PositiveInt = 32_768  # the longest context that the model is meant for
  rms_norm_eps: PositiveFloat = 1e-6
  initializer_range: PositiveFloat = 0.02
  dtype: DType = "float32"  # of activations and matmuls; norms, router, softmax and log-probs are always fp32
  param_dtype: DType = "float32"  # of stored parameters; under bfloat16 the optimiser keeps fp32 masters of them
  remat: Literal["none", "dots", "attention", "full", "offload"] = "none"  # what the backward pass recomputes
  moe_implementation: Literal["auto", "blocked", "megablox", "ragged_dot"] = "auto"  # auto: megablox on a TPU
  lora: LoRAConfig = LoRAConfig()  # of the policy; that of the critic is critic.lora
  checkpoint: str = ""  # checkpoints of a run, or a Hugging Face folder, to start from; empty: random initialisation

  @property
  def is_latent(self) -> bool:
    """Attention reads compressed keys and values (MLA), in place of grouped ones."""
    return self.kv_lora_rank > 0

  @property
  def longest_context(self) -> int:
    """Tokens that a context may have: `max_positions`, or more of them by YaRN."""
    stretched = int(self.yarn.original_positions * self.yarn.factor) if self.yarn.factor > 1.0 else 0
    return max(self.max_positions, stretched)

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

  # GAE with a critic, or without one: relative to the group, the same undivided, relative to a running mean of returns.
  advantage: Literal["sao", "grpo", "dr_grpo", "running_mean"] = "sao"
  baseline_scope: Literal["prompt", "global"] = "prompt"  # running_mean only: returns of the same prompt, or of all
  baseline_window: PositiveInt = 8  # the last so many of them
  policy_loss: Literal["dis", "ppo", "cispo", "gspo", "reinforce"] = "dis"  # sao_jax/algorithm/loss_variants.py
  policy_loss_reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # what counts the same
  loss_length: PositiveInt = 1024  # constant only: the loss is divided by trajectories times this
  epsilon_low: Annotated[float, "(0, 1]"] = 0.3  # deltas, not bounds: keep 1 - epsilon_low < ratio < 1 + epsilon_high
  epsilon_high: Annotated[float, "(0, inf]"] = 5.0  # inf: no upper end
  gamma: Annotated[float, "[0, 1]"] = 1.0
  alpha: Annotated[float, "[1, inf)"] = 1.5  # policy lambda = 1 - 1 / (alpha * n) >= 0, n sampled tokens
  policy_lambda: Literal["length_adaptive"] | Annotated[float, "[0, 1]"] = "length_adaptive"  # or one for all lengths
  # n counts a trajectory's sampled tokens (turns), or its observations as well, or the sampled tokens of a segment.
  lambda_length: Literal["steps", "response", "segment"] = "steps"
  # Its steps: sao_jax/algorithm/td_steps.py.
  gae: Literal["token", "step_average", "step_last", "through_observations", "segments"] = "token"
  critic_lambda: Annotated[float, "[0, 1]"] = 1.0  # 1: the value learns the return itself
  value_updates: PositiveInt = 2  # K: gradient steps of the critic on every batch
  advantage_values: Literal["post", "pre"] = "post"  # values read after the K critic updates, or before
  truncation: Literal["zero", "bootstrap", "mask"] = "zero"  # what follows a trajectory that was cut
  whiten_advantages: Literal["auto"] | bool = "auto"  # to mean 0, deviation 1; auto: unless the critic was pretrained
  freeze_attention: bool = True  # of the critic, during RL
  freeze_router: bool = False
  freeze_embeddings: bool = False
  value_clip: Annotated[float, "[0, inf]"] = 0.0  # PPO value clip range, 0: off
  value_head: Literal["scalar", "hl_gauss"] = "scalar"
  value_head_initializer: Literal["zeros", "normal"] = "zeros"  # V = 0, or N(0, model.initializer_range)
  critic_reads_logprobs: bool = False  # of the sampled tokens so far, as the sampler recorded them
  value_bins: int = 51  # hl_gauss only
  value_min: float = 0.0
  value_max: float = 1.0
  critic_warmup_steps: NonNegativeInt = 10  # critic-only steps at the start of RL
  router_replay: bool = False  # the policy trains with the experts that the sampler used (R3, arXiv 2510.11370)
  router_bias_update: NonNegativeFloat = 0.0  # of the sigmoid router's correction bias per step, towards an even load
  micro_batches: PositiveInt = 1
  logprob_chunk: PositiveInt = 1024  # tokens per block of the head; [rows, T, V] is never built

  @property
  def needs_critic(self) -> bool:
    """False for methods without a critic, which is then neither built nor trained nor saved."""
    return self.advantage == "sao"

  @property
  def needs_groups(self) -> bool:
    """True for methods that compare rollouts of one prompt with each other."""
    return self.advantage in ("grpo", "dr_grpo")

  @property
  def needs_baselines(self) -> bool:
    """True for methods that compare a return with earlier ones."""
    return self.advantage == "running_mean"

  def whitens(self, *, critic_pretrained: bool = False) -> bool:
    """Resolves `whiten_advantages`: auto whitens the advantages of a critic that starts cold."""
    if self.whiten_advantages == "auto":
      return self.needs_critic and not critic_pretrained
    return self.whiten_advantages


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """The value network, where it is not what the policy is (`ModelConfig`) and does not follow from the method."""

  lora: LoRAConfig = LoRAConfig()  # the head trains in any case; with model.lora, too, both networks share one base


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with global-norm clipping and linear warm-up to a constant learning rate."""

  learning_rate: NonNegativeFloat = 1e-6
  b1: Annotated[float, "[0, 1)"] = 0.9
  b2: Annotated[float, "[0, 1)"] = 0.98
  eps: PositiveFloat = 1e-8
  weight_decay: NonNegativeFloat = 0.1
  clip_norm: NonNegativeFloat = 1.0  # of the whole gradient; 0: no clipping
  warmup_steps: NonNegativeInt = 0


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the axes of a mesh of devices; one of them may be -1 (what is left)."""

  data: int = 1
  fsdp: int = -1
  expert: int = 1
  tensor: int = 1
  context: int = 1
  allow_split_physical_axes: bool = False  # axes that share the links of one axis of a TPU's torus, and are slower


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """The continuous-batching engine."""

  num_slots: PositiveInt = 32
  context_length: PositiveInt = 256  # tokens of KV cache per slot
  decode_steps: PositiveInt = 8  # decode steps per dispatch, at most
  decode_batch: PositiveInt = 32  # slots per dispatch; on accelerators all of them, on a CPU a few are faster (caches)
  prefill_buckets: Sizes = (16, 64, 256)  # padded lengths of a prefill; with a cache in pages see prefill_chunk
  prefill_batch: PositiveInt = 8  # sequences per prefill call
  prefill_chunk: PositiveInt = 256  # pages only: prompt tokens per dispatch, in each part of the sampler's mesh
  window_buckets: tuple[PositiveInt, ...] = ()  # attended cache lengths that decode compiles for; empty: powers of two
  temperature: NonNegativeFloat = 1.0  # of both sides, in training
  top_p: Annotated[float, "(0, 1]"] = 1.0
  top_k: NonNegativeInt = 0  # 0: all tokens
  kv_after_publish: Literal["keep", "reprefill"] = "keep"  # what becomes of the caches of running turns
  cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on a TPU, float32 elsewhere
  cache_layout: Literal["auto", "slots", "pages"] = "auto"  # auto: pages on a TPU; slots elsewhere, faster on a CPU
  page_size: PositiveInt = 128  # tokens of a page
  num_pages: NonNegativeInt = 0  # pages that the slots share; 0: as many as all of them need for full contexts
  mesh: MeshConfig | None = None  # of each sampler's devices; None: the learner's, or on other devices, slots spread


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """The asynchronous loop: admission, episodes, staleness, packing, placement."""

  batch_size: PositiveInt = 128  # trajectories per train step, of all processes together
  group_size: PositiveInt = 1  # rollouts of each prompt; 1 is single-rollout
  filter_equal_groups: bool = False  # groups of equal returns are left out, others take their place (DAPO)
  admission_staleness: NonNegativeInt = 4  # eta: rollouts from start to step <= (eta + 1) * batch_size; 0: synchronous
  max_staleness: Annotated[int, "[-1, inf)"] = 16  # tau: versions since the oldest token, at consumption; -1: any
  staleness: Literal["drop", "mask"] = "drop"  # what happens to a trajectory (its over-age tokens) beyond tau
  max_turns: PositiveInt = 50
  max_tokens: PositiveInt = 131_072  # sampled tokens per episode, in all of its contexts
  max_trajectory_tokens: NonNegativeInt = 0  # prompts, actions and observations of all of an episode's contexts; 0: any
  max_tokens_per_turn: PositiveInt = 64
  environment_timeout: PositiveFloat = 30.0  # seconds for one reset or step
  environment_retries: NonNegativeInt = 2
  outage_seconds: PositiveFloat = 300.0  # of nothing but failures of an environment; then the run stops with its name
  row_lengths: Sizes = (128, 256)  # packed row lengths T; the smallest that holds the longest trajectory
  row_counts: Sizes = (32, 64, 128)  # numbers of packed rows B; a batch that needs more gets a multiple of one
  difficulty_floor: Annotated[float, "[0.01, 1]"] = 1.0  # least chance of a prompt by its pass rate; 1: no filter
  difficulty_decay: Annotated[float, "[0, 1]"] = 0.9  # weight of a prompt's earlier rollouts, at each further one
  difficulty_passes: float = 1.0  # return, as it is trained on, from which on a rollout has passed
  max_in_flight: NonNegativeInt = 0  # episodes at the same time, parked beyond the sampler's slots; 0: as many as slots
  deterministic: bool = False  # rollouts in rounds, each under one version: a run that can be repeated bit for bit
  record: bool = False  # keep what every train step consumed, for launch.replay; deterministic runs always do
  placement: Literal["shared", "split"] = "shared"  # sampler and learner: on the same devices, or on two sets
  sampler_devices: NonNegativeInt = 0  # split only: how many devices of every host sample
  sampler_hosts: NonNegativeInt = 0  # split only: how many of several hosts sample, the last ones; the others learn
  hosts_per_sampler: PositiveInt = 1  # hosts, of those set apart, that hold one copy of the policy together


@dataclasses.dataclass(frozen=True)
class SFTConfig:
  """Imitation cold start on demonstrations that the environment produces."""

  steps: NonNegativeInt = 1000
  batch_size: PositiveInt = 64  # demonstrations per step, of all processes together
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-3, weight_decay=0.0, warmup_steps=50)


@dataclasses.dataclass(frozen=True)
class ValuePretrainingConfig:
  """Critic-only steps on episodes of the frozen initial policy, until held-out explained variance plateaus."""

  demonstration_steps: NonNegativeInt = 0  # the first so many steps are on demonstrations, which cost no rollouts
  min_steps: NonNegativeInt = 50  # of all steps, before a plateau may end the phase
  max_steps: NonNegativeInt = 500
  passes: PositiveInt = 2  # over every rollout: a step on a fresh batch, then passes - 1 steps on the store
  store_trajectories: PositiveInt = 4096  # the newest ones, in the host's memory and in checkpoints: ~ 20 bytes a token
  heldout_fraction: Annotated[float, "[0, 1)"] = 0.125  # of the prompts: their rollouts are stored, and not trained on
  evaluate_every: PositiveInt = 10  # steps between two measurements of the explained variance of what is held out
  plateau_window: PositiveInt = 5  # measurements in the running mean by which ...
  patience: PositiveInt = 10  # ... it has plateaued: the best of the last so many means ...
  plateau_gain: NonNegativeFloat = 0.01  # ... exceeds the best one before them by less than this
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6, clip_norm=10.0)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Held-out success, all on one policy version."""

  every: NonNegativeInt = 0  # policy versions between evaluations during training, first and last included; 0: none
  prompts: PositiveInt = 500
  temperature: NonNegativeFloat = 1.0
  seed: Seed = 20_260_729  # of the held-out prompts; not one that anybody trains with
  confidence: Annotated[float, "(0, 1)"] = 0.95
  sampler: Literal["own", "shared"] = "own"  # own: costs a second KV cache | shared: takes slots from the rollouts
  success_threshold: float = 1.0  # an episode succeeds when its return is at least this


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """The loop around the train step."""

  steps: NonNegativeInt = 1000  # policy updates
  seed: Seed = 0
  checkpoint_every: PositiveInt = 100  # train steps
  keep_checkpoints: PositiveInt = 2  # the newest ones
  keep_best: NonNegativeInt = 0  # those of greatest held-out success, too; each version that is evaluated is then saved
  log_every: PositiveInt = 1
  trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)  # beside metrics.jsonl
  tracker_project: str = "sao_jax"  # that wandb and trackio list the run under
  lock_seconds: NonNegativeFloat = 60.0  # wait for another run in the same workdir, which may still be saving
  audit: bool = True  # compare sampler and learner log-probs before the first step
  audit_tolerance: PositiveFloat = 1e-4  # max |delta log-prob|; raise it for bf16
  max_skipped_updates: PositiveInt = 10  # steps in a row whose updates are not finite, before the run stops
  watchdog_seconds: PositiveFloat = 600.0  # silence of the rollout side after which the run stops
  profile_steps: tuple[PositiveInt, ...] = ()  # first and last train step of a trace for xprof; empty: none


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """One run. `environment` is any frozen dataclass with `make(tokenizer)`, see sao_jax.environments.base."""

  environment: Any
  name: str = "run"
  model: ModelConfig = ModelConfig()
  algorithm: AlgorithmConfig = AlgorithmConfig()
  critic: CriticConfig = CriticConfig()
  policy_optimizer: OptimizerConfig = OptimizerConfig()
  critic_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6, clip_norm=10.0, warmup_steps=10)
  sampler: SamplerConfig = SamplerConfig()
  rollout: RolloutConfig = RolloutConfig()
  mesh: MeshConfig = MeshConfig()
  sft: SFTConfig = SFTConfig()
  value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
  evaluation: EvaluationConfig = EvaluationConfig()
  training: TrainingConfig = TrainingConfig()

  @property
  def shares_base(self) -> bool:
    """The critic reads the policy's own frozen matrices: both are LoRA of them, and none of the two changes them."""
    return self.algorithm.needs_critic and self.model.lora.rank > 0 and self.critic.lora.rank > 0
