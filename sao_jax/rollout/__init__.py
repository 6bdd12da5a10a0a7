"""The asynchronous half of training, on the host: prompts enter, trajectories leave, in batches.

A `RolloutLoop` runs episodes in a thread of its own, each a dialogue of an environment and the sampler, which it only
calls. The `Ledger` knows of every rollout where it is or what became of it, and decides when the next one may start.
The `TrajectoryBuffer` is the trainer's side: it checks what comes in, and holds what goes out to the staleness bound.
An `EpisodeRunner` runs episodes without any of that, for evaluation. Nothing here touches a device.
"""

from __future__ import annotations

from sao_jax.rollout.buffer import TrajectoryBuffer
from sao_jax.rollout.ledger import Ledger
from sao_jax.rollout.outcomes import Outcome
from sao_jax.rollout.rollout_loop import RolloutLoop
from sao_jax.rollout.runner import EpisodeRunner

__all__ = ["EpisodeRunner", "Ledger", "Outcome", "RolloutLoop", "TrajectoryBuffer"]
