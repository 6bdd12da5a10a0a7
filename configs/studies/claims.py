"""The paper's claims, each with the study, variant and measure that decide it here.

Differences are those from SAO at the same lag, seed by seed. The paper's figures are of AIME25 unless they say so.
"""

from __future__ import annotations

from sao_jax.study.claims import Claim

SUCCESS, DIP, SPEED = "heldout_success", "reward_mean:worst_dip", "reward_mean:mean"
EXPLAINED, SPIKES = "explained_variance:median", "critic_grad_norm:spikes"
REJECTED, RECOVERY = "rejected_low+rejected_high:mean", "info_success/online_styles:recovery"
LENGTH, USED = "response_length_mean", "used_over_generated_latency:mean"

LEVELS = (
  "Easy corridors end solved in all runs; hard ones as far as imitation had taught their keys, which differs more "
  "between seeds than between methods (`info_solved_*` in [stability](stability/table.md)): at 150 updates the start "
  "decides about the end."
)
WARM_UP = (
  "What is earned on the way is a mean over policy updates; the ten batches of the critic's warm-up come on top of "
  "those of methods without a critic, whose tokens are half an update older (`lag_mean:mean`)."
)
GROUPS = (
  "Batches of group methods have a fourth of the prompts, so that their mean reward is noisier "
  "(`reward_mean:noise` in [stability](stability/table.md)). White noise of these sizes alone makes dips that are .06 "
  "to .07 deeper than those of the other methods: a difference of that size says nothing of the method."
)
FEW = (
  "The five changes of explained variance are -.014 to .190: by Student's t their mean lies between -.016 and .190, "
  "which does not exclude that nothing rises."
)
CLAIMS = (
  Claim("DIS alone ends below SAO", "94.2 against 97.3", "stability", "sao_dis_only", SUCCESS, "lower"),
  Claim("GRPO + DIS ends below SAO", "93.5 against 97.3", "stability", "grpo_dis", SUCCESS, "lower"),
  Claim("VAPO ends below SAO", "91.3 against 97.3", "stability", "vapo", SUCCESS, "lower"),
  Claim("GRPO ends below SAO", "84.2 against 97.3", "stability", "grpo", SUCCESS, "lower", note=LEVELS),
  Claim("A running mean ends below SAO", "79.8 against 97.3", "stability", "running_mean_global", SUCCESS, "lower"),
  Claim("GRPO + DIS earns less on the way", "curves", "stability", "grpo_dis", SPEED, "lower", note=WARM_UP),
  Claim("GRPO falls on the way", "collapses near update 160", "stability", "grpo", DIP, "higher", note=GROUPS),
  Claim("VAPO falls on the way", "collapses near update 90", "stability", "vapo", DIP, "higher"),
  Claim("GRPO + DIS ends below SAO, at the least lag", "", "stability_lag1", "grpo_dis_lag1", SUCCESS, "lower"),
  Claim("GRPO ends below SAO, at the least lag", "", "stability_lag1", "grpo_lag1", SUCCESS, "lower"),
  Claim("GRPO + DIS ends below SAO, at the largest lag", "", "stability_lag16", "grpo_dis_lag16", SUCCESS, "lower"),
  Claim("GRPO ends below SAO, at the largest lag", "", "stability_lag16", "grpo_lag16", SUCCESS, "lower"),
  Claim("VAPO ends below SAO, at the largest lag", "", "stability_lag16", "vapo_lag16", SUCCESS, "lower"),
  Claim("GRPO falls within 1000 updates", "near update 160", "long_runs", "grpo_1000", DIP, "higher"),
  Claim("VAPO falls within 1000 updates", "near update 90", "long_runs", "vapo_1000", DIP, "higher"),
  Claim("GRPO + DIS ends below SAO, rate 3e-3", "", "high_rate", "grpo_dis_3e-3", SUCCESS, "lower"),
  Claim("GRPO ends below SAO, rate 3e-3", "", "high_rate", "grpo_3e-3", SUCCESS, "lower"),
  Claim("VAPO ends below SAO, rate 3e-3", "", "high_rate", "vapo_3e-3", SUCCESS, "lower"),
  Claim("DIS alone ends below SAO, rate 3e-3", "", "high_rate", "sao_dis_only_3e-3", SUCCESS, "lower"),
  Claim("A running mean ends below SAO, rate 3e-3", "", "high_rate", "running_mean_global_3e-3", SUCCESS, "lower"),
  Claim("Few tokens are rejected", "at most .006", "stability", "sao", REJECTED, "lower", than=0.006),
  Claim("One critic update explains less than two", "curves", "critic", "sao_k1", EXPLAINED, "lower"),
  Claim("One critic update ends below two", "95.0 against 97.3", "critic", "sao_k1", SUCCESS, "lower"),
  Claim("Explained variance rises", ".25 to .60", "critic", "sao", "explained_variance:change", "higher", 0.0, FEW),
  Claim("An unfrozen critic's gradients jump", "up to 10 for 3 to 5", "critic", "sao_full_critic", SPIKES, "higher"),
  Claim("An unfrozen critic ends below", "90.6 against 97.3", "critic", "sao_full_critic", SUCCESS, "lower"),
  Claim("Step-average ends below tokens", "85.8 against 89.8", "credit", "sao_step_average", SUCCESS, "lower"),
  Claim("Step-last-token ends below tokens", "87.3 against 89.8", "credit", "sao_step_last", SUCCESS, "lower"),
  Claim("Steps through observations do harm", "", "credit", "sao_through_observations", SPEED, "lower"),
  Claim("Without value pretraining less is earned", "essential", "pretraining", "sao_cold", SPEED, "lower"),
  Claim("Raw advantages of a cold critic do harm", "", "pretraining", "sao_cold_raw", SPEED, "lower"),
  Claim("No bounds of the ratio: falls on the way", "", "trust_region", "open", DIP, "higher"),
  Claim("Symmetric narrow bounds reject more", "", "trust_region", "narrow", REJECTED, "higher"),
  Claim("Dropped by age, long episodes are missing", "", "staleness", "drop", USED, "lower"),
  Claim("A running mean follows switches later", "curves", "online", "running_mean_global", RECOVERY, "higher"),
  Claim("GRPO follows switches later", "curves", "online", "grpo", RECOVERY, "higher"),
  Claim("GRPO + DIS shortens answers", "seen elsewhere", "answer_length", "grpo_dis", LENGTH, "lower"),
  Claim("GRPO + DIS ends below SAO, in one answer", "", "reasoning_gym", "grpo_dis", SUCCESS, "lower"),
  Claim("GRPO ends below SAO, in one answer", "", "reasoning_gym", "grpo", SUCCESS, "lower"),
)
