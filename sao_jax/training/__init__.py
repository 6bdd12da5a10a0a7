"""The readable loop and its phases: imitation, value pretraining, asynchronous SAO, replay.

A checked `RunConfig` and a working directory enter; checkpoints, metrics and a trained policy leave. Begin with `loop`.
"""

from __future__ import annotations

from sao_jax.training.loop import Result, pretrain_value, train
from sao_jax.training.rollouts import Rollouts

__all__ = ["Result", "Rollouts", "pretrain_value", "train"]
