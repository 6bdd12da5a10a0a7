"""The data on the devices: packed batches, network outputs and train states. `episode` has what stays on the host.

Shape letters: B rows, T tokens, L layers, D model, H heads, K kv heads, E experts, k active, V vocabulary, S slots.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int

from sao_jax.episode import Trajectory

__all__ = [
  "NetworkState",
  "Pieces",
  "PolicyOutputs",
  "RouterStatistics",
  "TrainState",
  "Trajectory",
  "TrajectoryBatch",
]

PyTree = Any


@flax.struct.dataclass
class Pieces:
  """The pieces of those trajectories of a batch that do not lie in one place.

  A piece is one or more segments in a row, and has a number of its own there, as if it were a whole trajectory. The P
  entries of the table are in order: trajectory by trajectory, each from its beginning to its end. P is three for each
  row, which suffices for every batch (see `learner.row_plan`), so that it does not depend on the trajectories. Rows of
  a micro-batch come with a share of the table that means nothing; what reads it gets the whole batch.

  Attributes:
    ids: int32 [B, T]; p + 1 on every token of piece p, 0 elsewhere.
    trajectory: int32 [P]; 1, 2, ... for the trajectories, 0 for entries that are not used.
    row: int32 [P]; the row that the piece lies in.
    column: int32 [P]; where its first token stands in that row.
  """

  ids: Int[Array, "B T"]
  trajectory: Int[Array, "P"]
  row: Int[Array, "P"]
  column: Int[Array, "P"]


@flax.struct.dataclass
class TrajectoryBatch:
  """Trajectories packed into rows, as the train step sees them; sharded over the data axes.

  Attributes:
    token_ids: int32 [B, T]; 0 on padding (never infer a mask from ids).
    segment_ids: int32 [B, T]; 0 on padding, 1, 2, ... for the segments of a row, in order: what sees each other.
    trajectory_ids: int32 [B, T]; 0 on padding, 1, 2, ... for the trajectories of a row, of one or more segments each:
      what advantages run over, and go on from row to row by `pieces`.
    positions: int32 [B, T]; restarts at 0 with every segment.
    action_mask: bool [B, T]; True on sampled tokens: those that advantages run over, whose number is n.
    loss_mask: bool [B, T]; True on the sampled tokens that enter the losses, whose number is N. A sampled token that is
      not trained (over age, say) keeps its place in the advantages of the others.
    behavior_logprobs: float32 [B, T]; NaN where not sampled, so that an unmasked use is seen at once.
    policy_version: int32 [B, T]; -1 where not sampled.
    rewards: float32 [B, T]; the reward of each turn on its last sampled token, usually of the last turn alone; 0
      elsewhere.
    truncated: bool [B, T]; True on every token of a trajectory that was cut before a true end.
    routed_experts: int16 [B, T, L, k]; the experts that the policy is to use in its L layers with experts, -1 where its
      routers choose. None: they choose everywhere.
    group_ids: int32 [B, T]; 0 on padding, 1, 2, ... for the groups of rollouts of one prompt in the whole batch, whose
      members may lie in different rows. None: rollouts are not compared with each other.
    baselines: float32 [B, T]; what the return of the token's trajectory is compared with; 0 on padding. None: the
      estimator of advantages wants none.
    pieces: the trajectories whose segments lie in several rows. None: there are none.

  A row of two trajectories, the second with a tool's answer (ids 8, 9) between its turns, and one token of padding, as
  `learner.packing.pack` makes it:

      token_ids       5  6  7   5  6  8  9  7   0
      trajectory_ids  1  1  1   2  2  2  2  2   0
      positions       0  1  2   0  1  2  3  4   0
      action_mask     -  x  x   -  x  -  -  x   -
      rewards         0  0  1   0  0  0  0  1   0
  """

  token_ids: Int[Array, "B T"]
  segment_ids: Int[Array, "B T"]
  trajectory_ids: Int[Array, "B T"]
  positions: Int[Array, "B T"]
  action_mask: Bool[Array, "B T"]
  loss_mask: Bool[Array, "B T"]
  behavior_logprobs: Float[Array, "B T"]
  policy_version: Int[Array, "B T"]
  rewards: Float[Array, "B T"]
  truncated: Bool[Array, "B T"]
  routed_experts: Int[Array, "B T L k"] | None = None
  group_ids: Int[Array, "B T"] | None = None
  baselines: Float[Array, "B T"] | None = None
  pieces: Pieces | None = None


@flax.struct.dataclass
class RouterStatistics:
  """Work of the routers in the L layers with experts, as sums over the tokens of every row without padding; fp32.

  Attributes:
    tokens: number of tokens.
    load: number of tokens that used each expert.
    entropy: sums of the entropies of the routers' distributions over experts, in nats.
    replayed: number of choices (k for each token) that were the sampler's.
    agreeing: number of replayed choices that the router prefers too.
    dropped: number of choices, padding included, that no expert computed: 0, or the layer is not dropless.
  """

  tokens: Float[Array, " B"]
  load: Float[Array, "B L E"]
  entropy: Float[Array, "B L"]
  replayed: Float[Array, "B L"]
  agreeing: Float[Array, "B L"]
  dropped: Float[Array, "B L"]


@flax.struct.dataclass
class PolicyOutputs:
  """The policy's outputs on a packed batch.

  Attributes:
    logprobs: float32 [B, T], log π of each token given the tokens before it; 0 where there are none.
    entropy: float32 [B, T], entropy of the distribution that the token was drawn from, in nats.
    router: the routers' work; None for a model without experts.
  """

  logprobs: Float[Array, "B T"]
  entropy: Float[Array, "B T"]
  router: RouterStatistics | None = None


@flax.struct.dataclass
class NetworkState:
  """One network in training.

  Attributes:
    params: the parameter tree, frozen leaves included, except those that are the policy's (see `Network.join`).
    opt_state: optimiser state of the trainable leaves only.
    step: int32 scalar, number of updates applied (skipped non-finite ones do not count).
  """

  params: PyTree
  opt_state: PyTree
  step: Int[Array, ""]


@flax.struct.dataclass
class TrainState:
  """Everything that the train step reads and returns (donated).

  Attributes:
    policy: the policy network.
    critic: the value network; None for an estimator of advantages without one.
    policy_version: int32 scalar; version v = parameters after v policy updates. An update that the
      non-finite guard skipped counts, as an empty update, so that host and device always agree.
  """

  policy: NetworkState
  critic: NetworkState | None
  policy_version: jax.Array
