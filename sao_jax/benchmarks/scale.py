"""The sizes of the measurements: the full ones, and tiny ones that only show that everything runs."""

from __future__ import annotations

import dataclasses

from sao_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Scale:
  """Sizes of all suites.

  Attributes:
    model: of the dense transformer; `mixture_of_experts` derives the others.
    expert_width: width of an expert; every token passes two of them.
    experts: numbers of experts to compare; `model_experts` of them elsewhere.
    slots: numbers of slots to compare, all busy with `prompt_length` + `answer_length` tokens.
    num_requests: with uneven answers, on the largest number of slots.
    prompt_lengths: shortest and longest prompt of those.
    answer_minimum, answer_maximum: of their budgets min(maximum, minimum · (1 + Pareto(1.5))).
    rows, tokens: shape [B, T] of a train step's batch.
    gemm_size: of the square matrix product that is the limit.
    rounds: timed repetitions of everything.
    imitation_steps, loop_steps: of the run whose compilations are counted.
  """

  model: ModelConfig
  expert_width: int
  experts: tuple[int, ...]
  model_experts: int
  slots: tuple[int, ...]
  prompt_length: int
  answer_length: int
  num_requests: int
  prompt_lengths: tuple[int, int]
  answer_minimum: int
  answer_maximum: int
  rows: int
  tokens: int
  gemm_size: int
  rounds: int
  imitation_steps: int
  loop_steps: int

  def mixture_of_experts(self, num_experts: int) -> ModelConfig:
    """The same transformer with top-2 experts in place of every dense feed-forward."""
    return dataclasses.replace(
      self.model, num_experts=num_experts, num_experts_per_token=2, d_ff_expert=self.expert_width
    )

  def models(self) -> dict[str, ModelConfig]:
    """The two models that are compared with other frameworks."""
    return {"dense": self.model, "moe": self.mixture_of_experts(self.model_experts)}


FULL = Scale(
  model=ModelConfig(
    vocab_size=512, num_layers=4, d_model=128, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=384, qk_norm=True
  ),
  expert_width=128,
  experts=(4, 8, 16, 32),
  model_experts=8,
  slots=(1, 8, 32, 64),
  prompt_length=32,
  answer_length=96,
  num_requests=256,
  prompt_lengths=(8, 64),
  answer_minimum=16,
  answer_maximum=128,
  rows=64,
  tokens=128,
  gemm_size=2048,
  rounds=5,
  imitation_steps=150,
  loop_steps=16,
)

QUICK = Scale(
  model=ModelConfig(vocab_size=32, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=32),
  expert_width=16,
  experts=(2, 4),
  model_experts=2,
  slots=(1, 4),
  prompt_length=6,
  answer_length=6,
  num_requests=8,
  prompt_lengths=(4, 8),
  answer_minimum=2,
  answer_maximum=8,
  rows=4,
  tokens=16,
  gemm_size=128,
  rounds=2,
  imitation_steps=2,
  loop_steps=6,
)
